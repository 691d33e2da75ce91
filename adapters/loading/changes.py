"""What a user changes of the models that are named: the one record that commands and the Python API fill."""

from pathlib import Path

import attrs

from posttrainllm.kernel.errors import UsageError

__all__ = ["KV_BITS", "KV_GROUP_SIZES", "UNCHANGED", "ModelChanges"]

KV_BITS = (8, 4)
KV_GROUP_SIZES = (32, 64, 128)


@attrs.frozen(kw_only=True)
class ModelChanges:
    """Adapters, and how keys and values are kept."""

    adapter_path: str | Path | None = None
    """Directory of the target's adapter, or an id of the hub."""
    draft_adapter_path: str | Path | None = None
    """The draft's."""
    kv_bits: int | None = None
    """Bits of a key's or a value's element, in both models; None keeps them in the weights' type."""
    kv_group_size: int = 64
    """Elements that share a scale."""

    @property
    def options(self) -> list[str]:
        """As on a command line; empty where nothing is changed."""
        return [*self.target_options, *self.draft_options]

    @property
    def target_options(self) -> list[str]:
        """Those that a run without a draft takes, too."""
        adapter = [] if self.adapter_path is None else ["--adapter-path", str(self.adapter_path)]
        packing = ["--kv-bits", str(self.kv_bits), "--kv-group-size", str(self.kv_group_size)]
        return adapter + ([] if self.kv_bits is None else packing)

    @property
    def draft_options(self) -> list[str]:
        """Those of the draft alone."""
        return [] if self.draft_adapter_path is None else ["--draft-adapter-path", str(self.draft_adapter_path)]

    def check(self, *, drafted: bool) -> None:
        """Refuse what can never work.

        Args:
            drafted: whether there is a draft.

        Raises:
            UsageError: with got and expected.
        """
        for name in ("adapter_path", "draft_adapter_path"):
            path, option = getattr(self, name), "--" + name.replace("_", "-")
            if path is not None and (not isinstance(path, (str, Path)) or not str(path)):
                raise UsageError(f"{option}: got {path!r}, expected an adapter's directory or an id of the hub")
        if self.draft_adapter_path is not None and not drafted:
            raise UsageError(f"--draft-adapter-path: got {self.draft_adapter_path} without a draft, expected one")
        if self.kv_bits is not None and self.kv_bits not in KV_BITS:
            raise UsageError(f"--kv-bits: got {self.kv_bits!r}, expected one of {', '.join(map(str, KV_BITS))}")
        if self.kv_group_size not in KV_GROUP_SIZES:
            sizes = ", ".join(map(str, KV_GROUP_SIZES))
            raise UsageError(f"--kv-group-size: got {self.kv_group_size!r}, expected one of {sizes}")


UNCHANGED = ModelChanges()
