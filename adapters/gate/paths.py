"""The gated paths. A new fast path is one more entry of this table; the harness stays as it is."""

from collections.abc import Callable, Mapping

import attrs

from posttrainllm.adapters.adaptive import Curve
from posttrainllm.adapters.engine import Engine
from posttrainllm.adapters.loading.pair import Pair
from posttrainllm.kernel.config import Mode

__all__ = ["PATHS", "GatedPath", "Shape"]


@attrs.frozen(kw_only=True)
class Shape:
    """What bits may depend on beside a row's own history: one set of shapes for a whole run."""

    rows: int
    """B."""
    capacity: int
    """C."""
    draft_k: int
    """K."""
    curves: Mapping[Mode, Curve] | None = None
    """What steps cost, where K is chosen by that from step to step, up to `draft_k`."""

    @property
    def width(self) -> int:
        """W: the width of the verification, and of the reference."""
        return self.draft_k + 1


@attrs.frozen(kw_only=True)
class GatedPath:
    """A way to decode faster that promises not to change the output, and what it is held against.

    Each function builds an engine of `shape.rows` rows and `shape.capacity` slots; one is alive at a time.
    """

    name: str
    """Short, for keys and messages."""
    title: str
    """For people, and the table in docs/techniques/precision.md."""
    candidate: Callable[[Pair, Shape], Engine]
    """The path itself."""
    reference: Callable[[Pair, Shape], Engine]
    """What it must equal bit for bit; reports logit margins."""
    usual: Callable[[Pair, Shape], Engine]
    """Plain decoding as it is without any fast path, at width 1."""


def _speculative(pair: Pair, shape: Shape) -> Engine:
    return Engine(pair, rows=shape.rows, capacity=shape.capacity, width=shape.width, curves=shape.curves)


def _plain(pair: Pair, shape: Shape) -> Engine:
    plain = pair.plain("a reference is decoded plainly")
    return Engine(plain, rows=shape.rows, capacity=shape.capacity, width=shape.width, diagnostics=True)


def _plain_width_1(pair: Pair, shape: Shape) -> Engine:
    return Engine(pair.plain("width 1 is decoded plainly"), rows=shape.rows, capacity=shape.capacity, width=1)


PATHS = (
    GatedPath(
        name="speculative",
        title="vanilla speculative decoding",
        candidate=_speculative,
        reference=_plain,
        usual=_plain_width_1,
    ),
)
