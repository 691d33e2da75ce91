"""Where a model lies: a directory, a `.tinygpt` or a GGUF file here, or an id of the Hugging Face hub."""

import re
import sys
from pathlib import Path

from posttrainllm.adapters.messages import collapsed
from posttrainllm.kernel.errors import CheckpointError

__all__ = ["locate"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# what mlx-lm reads, but no code: a checkpoint's own Python files are never run
_FILES = ["*.json", "model*.safetensors", "adapter*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt"]


def locate(model: str | Path) -> Path:
    """Find a model's directory or file; an id of the hub is downloaded, or taken from the hub's cache here.

    Args:
        model: a directory, a `.tinygpt` or a GGUF file, or "owner/name" where nothing of that name exists.

    Returns:
        The directory or file; what is in it is for `read_checkpoint` to judge.

    Raises:
        CheckpointError: there is no such directory and the hub does not give the model.
    """
    path = Path(model)
    try:
        here = path.exists() or path.is_symlink()
    except OSError as error:  # a name too long, a folder that may not be read
        raise CheckpointError(f"{str(model)[:100]}: {error.strerror or error}") from None
    if here or path.suffix in (".tinygpt", ".gguf") or not _ID.fullmatch(str(model)):
        return path
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined] # named nowhere but there

    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(str(model), allow_patterns=_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:  # the second may have the first as its cause
        response = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
        code = getattr(response, "status_code", None)
        if code is None:
            problem = "the hub cannot be reached and its cache here does not hold it"
        else:
            why = " (does it exist, is it private or gated?)" if code in (401, 403, 404) else ""
            problem = f"the hub answers {code}{why}"
    except Exception as error:  # a full disk, or whatever the client makes of an answer that it does not expect
        problem = f"the hub does not give it ({type(error).__name__}: {collapsed(error, 200)})"
    raise CheckpointError(f"{model}: got neither a directory here nor a model of the hub: {problem}")
