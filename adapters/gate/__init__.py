"""The numerics gate: is what a fast path emits what the target alone emits, on this machine?"""
