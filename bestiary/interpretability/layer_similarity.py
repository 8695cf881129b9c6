"""Two measures of the similarity of convolution layers: the distance of their weights, and the CKA of their outputs."""

import re

from torch import Tensor

MATCHINGS = ("index", "optimal", "filters")
MAX_MATCHED_KERNELS = 4096  # maximum for the matching "optimal"; with more kernels, it would take minutes and gigabytes


def convolution_weights(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights [out,in,k,k] of all convolutions by layer name.

    Layers are sorted by name, with numbers in numerical order: layer 2 comes before layer 10.
    """
    names = [name for name, tensor in model.items() if tensor.dim() == 4 and name.endswith(".weight")]
    natural = sorted(names, key=lambda name: [int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", name)])
    return {name.removesuffix(".weight"): model[name].float() for name in natural}


def can_match(weights: Tensor, matching: str) -> bool:
    """Return whether the layer has few enough kernels for the matching. Only "optimal" has a limit."""
    return matching != "optimal" or weights.shape[0] * weights.shape[1] <= MAX_MATCHED_KERNELS


def kernel_distance(first: Tensor, second: Tensor, matching: str = "index") -> float:
    """Return the sum of squared differences of the weights [out,in,k,k] of two convolutions.

    A kernel consists of the k x k weights from one input channel to one output channel. A filter consists of all
    kernels of one output channel. `matching` determines which weights are compared with each other:

        index     kernels with the same index
        optimal   kernels are paired such that the sum is as small as possible. Published comparisons use this method.
                  However, a distance of 0 does not mean that two networks compute the same: reordering the kernels of
                  a network changes what it computes.
        filters   whole filters are paired such that the sum is as small as possible
    """
    vectors = [w.flatten(1) if matching == "filters" else w.flatten(2).flatten(0, 1) for w in (first, second)]
    left, right = (v.double().numpy() for v in vectors)
    if matching == "index":
        return float(((left - right) ** 2).sum())
    from scipy.optimize import linear_sum_assignment  # here, because "index" does not need SciPy

    cost = (left**2).sum(1)[:, None] + (right**2).sum(1)[None] - 2 * left @ right.T
    rows, columns = linear_sum_assignment(cost)
    return float(((left[rows] - right[columns]) ** 2).sum())


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear centred kernel alignment (CKA) of features `x` [n,p] and `y` [n,q] of the same n >= 4 frames.

    1 means that `x` is a rotated and scaled version of `y`. 0 means no similarity. The result is NaN if `x` or `y` is
    constant.

    Plain CKA (Kornblith et al. 2019) is close to 1 for any two layers that have far more features than there are
    frames. Therefore an unbiased estimator is used (Szekely & Rizzo 2014). It ignores the diagonal of the Gram matrix,
    because these entries are products of a frame's features with themselves. The estimate can be slightly negative.
    """
    first, second = (_centred_gram_matrix(features.double()) for features in (x, y))
    norm = float(first.norm() * second.norm())
    return float((first * second).sum()) / norm if norm > 0 else float("nan")


def _centred_gram_matrix(features: Tensor) -> Tensor:
    """Return the U-centred Gram matrix [n,n] of features [n,p] (Szekely & Rizzo 2014). Its diagonal is zero."""
    n = len(features)
    centred = features - features.mean(0)
    gram = (centred @ centred.T).fill_diagonal_(0)
    rows = gram.sum(0) / (n - 2)
    return (gram - rows - rows.unsqueeze(1) + rows.sum() / (n - 1)).fill_diagonal_(0)
