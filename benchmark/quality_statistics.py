"""From windows to rows: means, and bootstrap intervals that are paired by window and clustered by passage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
COVERAGE = 0.95


class Bootstrap:
    """Draws passages with replacement, the same ones for everything that is compared.

    Windows of a passage are correlated, so a passage is drawn with all of its windows. With few passages such intervals
    are too narrow.

    Parameters
    ----------
    sizes
        Windows of each passage.
    """

    def __init__(self, sizes: Sequence[int], seed: int, resamples: int = RESAMPLES) -> None:
        self._sizes = np.asarray(sizes)
        draws = np.random.default_rng(seed).integers(len(sizes), size=(resamples, len(sizes)))
        self._counts = np.stack([(draws == passage).sum(1) for passage in range(len(sizes))], axis=1)

    def means(self, passages: Sequence[np.ndarray]) -> np.ndarray:
        """Means ``[1 + resamples, columns]`` over windows: of the sample itself, then of every resample.

        Parameters
        ----------
        passages
            Values ``[windows, columns]`` of each passage.
        """
        sums = np.stack([values.sum(0) for values in passages])
        counts = np.concatenate([np.ones((1, len(sums))), self._counts])
        return (counts @ sums) / (counts @ self._sizes)[:, None]

    def interval(self, resampled: np.ndarray) -> list[float] | None:
        """Percentile interval of a statistic ``[1 + resamples]``; None where one passage leaves nothing to draw."""
        if len(self._sizes) < 2:
            return None
        tail = (1 - COVERAGE) / 2
        return [round(float(x), 6) for x in np.quantile(resampled[1:], [tail, 1 - tail])]


def summarise(
    means: np.ndarray, oracle: np.ndarray, reference: np.ndarray | None, bootstrap: Bootstrap
) -> dict[str, object]:
    """Fields of a row from the means ``[1 + resamples, COLUMNS]`` of it, of the one-list oracle, and of a reference.

    `kl_over_oracle` is a ratio of means, `kl_minus_default` a difference (None without a reference), `perplexity` and
    `dense_perplexity` those of the text's own next tokens, `perplexity_difference` the first minus the second.
    """
    kl, agreement, mass, nll, dense_nll = means.T
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = kl / oracle[:, 0]
    statistics = dict(
        kl=kl,
        agreement=agreement,
        mass=mass,
        kl_over_oracle=ratio if np.isfinite(ratio).all() else None,
        kl_minus_default=None if reference is None else kl - reference[:, 0],
        perplexity_difference=np.exp(nll) - np.exp(dense_nll),
    )
    values = {name: None if value is None else round(float(value[0]), 6) for name, value in statistics.items()}
    intervals = {name: None if value is None else bootstrap.interval(value) for name, value in statistics.items()}
    dense = round(float(np.exp(dense_nll[0])), 4)
    return dict(**values, perplexity=round(float(np.exp(nll[0])), 4), dense_perplexity=dense, ci=intervals)
