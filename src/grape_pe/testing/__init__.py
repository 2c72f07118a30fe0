"""Public checks for encodings: the laws (`laws`), and random cases against dense computations (`fuzz`)."""

from .laws import (
    TOL,
    LawDoesNotHold,
    Sample,
    assert_close,
    assert_composition,
    assert_linear_in_offset,
    assert_nonpositive,
    assert_norm,
    assert_path_composition,
    assert_relative_law,
    assert_streaming,
    assert_unipotent,
    parameter_dtype,
    sample,
    scores,
)

__all__ = [
    "TOL",
    "LawDoesNotHold",
    "Sample",
    "assert_close",
    "assert_composition",
    "assert_linear_in_offset",
    "assert_nonpositive",
    "assert_norm",
    "assert_path_composition",
    "assert_relative_law",
    "assert_streaming",
    "assert_unipotent",
    "parameter_dtype",
    "sample",
    "scores",
]
