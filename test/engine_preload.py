"""What the fork server of `scheduler_harness` imports once, so that no engine of a test pays for it.

SGLang looks at all of its modules for each hook of a plugin, which is half of a tiny engine's start.
"""

import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # all models of SGLang
import sglang.srt.speculative.standalone_worker_v2  # noqa: F401
from sglang.srt.plugins import load_plugins

load_plugins()

import dustin_sglang.worker  # noqa: E402, F401
