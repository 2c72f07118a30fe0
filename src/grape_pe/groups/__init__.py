"""Mathematics on tensors: the groups that positions act through. No modules, no parameters.

`rotation`  commuting rotations in SO(d): coordinate planes, and planes of a learned basis
`rank2`     one plane spanned by any two vectors, by the closed form of its exponential
`mixture`   non-commuting rank-2 terms inside a thin subspace
`unipotent` additive logits as actions in GL(d+k), and both families in one action
`spectrum`  eigenvalues, singular values, determinant and condition of all of these

A group element is a frozen dataclass with the same verbs everywhere: `apply` (never builds the
matrix), `as_matrix`, `compose`, `inverse`.
"""

from ..precision import exact_dtype
from .mixture import JointMixtureRotation, MixtureRotation, orthonormal_columns, skew_from_pairs
from .rank2 import Rank2Rotation, complex_structure, quarter_turn, rank2_generator
from .rotation import (
    BasisRotation,
    DenseRotation,
    PartialRotation,
    PlaneRotation,
    ScaledRotation,
    cayley_from,
    fourier_basis,
    matrix_exp,
    orthogonal_from,
    reduce_angle,
    unitary_from,
)
from .spectrum import Spectrum
from .unipotent import (
    Joint,
    Unipotent,
    check_dictionary,
    lift_key,
    lift_query,
    path_product,
    score,
    shift_generator,
    slope_generator,
)

__all__ = [
    "BasisRotation",
    "DenseRotation",
    "Joint",
    "JointMixtureRotation",
    "MixtureRotation",
    "PartialRotation",
    "PlaneRotation",
    "Rank2Rotation",
    "ScaledRotation",
    "Spectrum",
    "Unipotent",
    "cayley_from",
    "check_dictionary",
    "complex_structure",
    "exact_dtype",
    "fourier_basis",
    "lift_key",
    "lift_query",
    "matrix_exp",
    "orthogonal_from",
    "orthonormal_columns",
    "path_product",
    "quarter_turn",
    "rank2_generator",
    "reduce_angle",
    "score",
    "shift_generator",
    "skew_from_pairs",
    "slope_generator",
    "unitary_from",
]
