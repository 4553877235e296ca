"""Lets torchvision be imported where its compiled operators cannot load.

The torchvision wheel of the default index is built for CUDA. Beside a CPU build of torch its library cannot load, and
`import torchvision` ends with "operator torchvision::nms does not exist", because it registers fake kernels
for two operators without asking whether they are there. The image and video processors need neither of them.
"""

import importlib.machinery
import importlib.util
import logging
import sys

logger = logging.getLogger(__name__)

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def define() -> None:
    """Make `import torchvision` work, with or without its compiled operators; repeated calls do nothing.

    Does not import torchvision. Where the operators are defined without a kernel, calling one raises torchvision's own
    RuntimeError ("Couldn't load custom C++ ops"). Raises ImportError if torch is missing.
    vLLM calls it as a platform plugin, which for None stays inactive: so it runs in each of vLLM's processes before
    torchvision is imported, unless VLLM_TARGET_DEVICE=cpu or VLLM_PLUGINS keeps vLLM from asking its plugins.
    """
    if "torchvision" in sys.modules:
        return
    package = importlib.util.find_spec("torchvision")
    if package is None:
        return

    import torch

    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return
    problem = _load_compiled(list(package.submodule_search_locations or ()))
    if problem is None:
        return
    logger.info("torchvision's compiled operators cannot load (%s): defining %s without them", problem, missing)
    for name in missing:
        torch.library.define(f"torchvision::{name}", _SCHEMA)


def _load_compiled(folders: list[str]) -> Exception | None:
    """What stops torchvision's library from loading, or None. torchvision tries the same; it costs milliseconds."""
    import torch

    library = importlib.machinery.PathFinder.find_spec("_C", folders)
    if library is None or library.origin is None:
        return ImportError(f"no compiled library in {folders}")
    try:
        torch.ops.load_library(library.origin)
    except (ImportError, OSError) as problem:
        return problem.__cause__ if isinstance(problem.__cause__, Exception) else problem
    return None
