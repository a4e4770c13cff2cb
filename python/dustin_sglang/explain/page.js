"use strict";
// The page comes with its first round drawn; this draws the others over it, in the same way (page.py).
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const slider = $("round"), play = $("play"), text = $("text"), strip = $("strip");
  let view = "list", timer = null;

  // Half-open ranges [start, end, mark] of equal neighbours.
  function runs(marks) {
    const found = [];
    for (let start = 0, i = 1; i <= marks.length; i++) {
      if (i < marks.length && marks[i] === marks[start]) continue;
      found.push([start, i, marks[start]]);
      start = i;
    }
    return found;
  }

  function span(content, name, title) {
    const made = document.createElement("span");
    made.className = name;
    made.textContent = content;
    if (title) made.title = title;
    return made;
  }

  function drawText(round) {
    const list = view === "list", parts = document.createDocumentFragment();
    for (const [start, end, mark] of runs(round[view])) {
      const content = data.pieces.slice(start, end).join("");
      if (mark === "." || mark === "0") { parts.append(content); continue; }
      const what = list ? data.names[mark] : `${2 ** (mark - 1)} times the mean or more`;
      parts.append(span(content, list ? mark : `h${mark}`, `${start} to ${end - 1}: ${what}`));
    }
    text.replaceChildren(parts);
  }

  function drawStrip(round) {
    strip.setAttribute("viewBox", `0 0 ${data.pieces.length} 1`);
    const least = data.pieces.length / 1000;
    strip.innerHTML = runs(round.list).filter(([, , mark]) => mark !== ".").map(([start, end, mark]) =>
      `<rect class="${mark}" x="${start}" width="${Math.max(end - start, least)}" height="1"/>`).join("");
  }

  function drawCounts(round) {
    const counts = {};
    for (const mark of round.list) counts[mark] = (counts[mark] || 0) + 1;
    const listed = round.list.length - (counts["."] || 0);
    for (const mark of Object.keys(data.names)) {
      const count = counts[mark] || 0;
      $(`count-${mark}`).textContent = count;
      $(`share-${mark}`).textContent = `${(100 * count / listed).toFixed(1)}%`;
    }
    $("listed").textContent = listed;
    $("share").textContent = `${(100 * listed / round.list.length).toFixed(1)}% of the context`;
  }

  function drawVerified(round) {
    const spans = round.verified.map(([piece, kind]) => span(piece, kind, data.kinds[kind]));
    $("verified").replaceChildren(...spans);
    $("answer").textContent = data.pieces.slice(data.prompt, round.n + 1).join("");
  }

  function draw() {
    const index = Number(slider.value) - 1, round = data.rounds[index];
    drawText(round);
    drawStrip(round);
    drawCounts(round);
    drawVerified(round);
    $("where").textContent = `Round ${index + 1} of ${data.rounds.length}, ${round.n} committed tokens`;
    slider.setAttribute("aria-valuetext", $("where").textContent);
    for (const end of ["x1", "x2"]) $("now").setAttribute(end, round.x);
  }

  // Scroll the text so that a position is in its middle.
  function show(position) {
    let rest = data.pieces.slice(0, position).join("").length;
    const nodes = document.createTreeWalker(text, NodeFilter.SHOW_TEXT);
    while (nodes.nextNode()) {
      const length = nodes.currentNode.length;
      if (rest >= length) { rest -= length; continue; }
      const place = document.createRange();
      place.setStart(nodes.currentNode, rest);
      place.setEnd(nodes.currentNode, rest + 1);
      text.scrollTop += place.getBoundingClientRect().top - text.getBoundingClientRect().top - text.clientHeight / 2;
      return;
    }
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.textContent = "Play";
  }

  function step() {
    slider.value = Number(slider.value) + 1;
    if (Number(slider.value) === data.rounds.length) stop();
    draw();
  }

  play.addEventListener("click", () => {
    if (timer !== null) return stop();
    if (Number(slider.value) === data.rounds.length) slider.value = 0;
    play.textContent = "Pause";
    timer = setInterval(step, 800);
    draw();
  });
  slider.addEventListener("input", () => { stop(); draw(); });
  strip.addEventListener("click", (event) => {
    const box = strip.getBoundingClientRect();
    show(Math.floor((event.clientX - box.left) / box.width * data.pieces.length));
  });
  for (const radio of document.querySelectorAll("input[name=view]"))
    radio.addEventListener("change", () => { view = radio.value; draw(); });
  document.documentElement.classList.add("with-script");
  draw();
})();
