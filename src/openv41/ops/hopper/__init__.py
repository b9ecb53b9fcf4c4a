"""HopperOps: the operations of an attention layer on one Hopper GPU, by kernels of our own.

Here a call is sent to the launch module that knows its kernel; those check shapes and launch; the kernels stand in
`ops/kernels`. What is not overridden is inherited by name: the library's products, see `ops.fast`.

    attend, attend_gluon    attention over rows as they are stored, or over rows of bf16
    score, pick, select     index scores to the bit, and the best of them
    rows                    norm, rotation, rounding, storing
    products                linear maps that read fp8 weights as fp8
    trained                 TrainedOps, what training runs on: by attend and backward, sinkhorn, streams, gated, rotate,
                            rounding, index_plain
"""

from openv41.ops.hopper.ops import HopperOps
from openv41.ops.hopper.trained import TrainedOps

__all__ = ["HopperOps", "TrainedOps"]
