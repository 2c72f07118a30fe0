"""Group elements for position encodings: functions and frozen dataclasses of tensors, without parameters.

`rotation`  commuting rotations in SO(D): coordinate planes, and planes of a learned basis
`rank2`     rotation in the plane spanned by any two vectors
`mixture`   rotations inside a learned subspace, whose generators need not commute
`unipotent` additive logits as matrices in GL(D + k), alone or joint with a rotation
`spectrum`  eigenvalues, singular values, determinant and condition number of all of these

Every element has the same methods: `apply` multiplies vectors by it without building its matrix, `as_matrix`
builds the matrix, `compose` and `inverse` return new elements.
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
