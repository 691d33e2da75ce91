"""Log probabilities on the host."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from posttrainllm.adapters.result import TokenLogprobs

__all__ = ["read_logprobs"]

_IMPOSSIBLE = -9999.0


def read_logprobs(
    ids: Sequence[int],
    own: npt.NDArray[np.float32],
    top_ids: npt.NDArray[np.int32],
    top_logprobs: npt.NDArray[np.float32],
    count: int,
) -> tuple[TokenLogprobs, ...]:
    """Log probabilities as a reply has them.

    Args:
        ids: N of them.
        own: [N or more], log probability of each.
        top_ids: [N or more, 20], the likeliest ids at each position.
        top_logprobs: [N or more, 20].
        count: how many of those to keep, 0 to 20.

    Returns:
        One a given id. An id that the target never emits has -9999: JSON has no infinity.
    """
    return tuple(
        TokenLogprobs(
            token_id=int(index),
            logprob=max(float(own[place]), _IMPOSSIBLE),
            top=tuple(
                (int(top_ids[place, rank]), max(float(top_logprobs[place, rank]), _IMPOSSIBLE))
                for rank in range(min(count, top_ids.shape[1]))
            ),
        )
        for place, index in enumerate(ids)
    )
