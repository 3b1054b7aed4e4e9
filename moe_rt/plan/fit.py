"""Robust fits of a family's parameters in log space, and the correction of what the formula leaves over.

The fit minimises Huber's loss of log(predicted / measured) plus a prior around usual values, by Levenberg-Marquardt.
Residuals of a calibrated system are smooth in the shape, so a Gaussian process predicts them near measured shapes; it
returns to zero away from them and states how uncertain it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moe_rt.plan.distinct import Array
from moe_rt.plan.families import FAMILIES, Family, Values
from moe_rt.plan.points import Points

NOISE = 0.03  # assumed scatter of a measurement, in log units
STEPS = 150
HUBER = 2.5  # residuals beyond this many NOISE count linearly
# Distances, in powers of two, over which residuals are alike: tokens, row bytes, topk, experts, ranks, SMs.
LENGTHS = np.array([2.0, 1.0, 1.0, 1.5, 1.0, 0.5])


def fit(
    family: Family, x: Points, measured_us: Array, usual: Values | None = None, steps: int = 150
) -> dict[str, float]:
    """Fit a family's parameters to measured times.

    Args:
        x: shapes, n points.
        measured_us: times, [n].
        usual: centres of the prior, by name; the family's usual values where missing.

    Returns:
        The value of each parameter, by name.
    """
    centre = np.log([(usual or {}).get(p.name, p.usual) for p in family.parameters])
    spread = np.array([p.spread for p in family.parameters])
    target = np.log(measured_us)

    def residuals(theta: Array) -> Array:
        with np.errstate(all="ignore"):
            predicted = family.seconds(dict(zip(family.names, np.exp(theta), strict=True)), x)
        return np.concatenate([(np.log(np.maximum(predicted, 1e-9)) - target) / NOISE, (theta - centre) / spread])

    theta, prior = centre.copy(), len(centre)
    residual, damping = residuals(theta), 1e-2
    loss = _loss(residual, prior)
    for _ in range(STEPS):
        jacobian = np.stack([(residuals(theta + 1e-5 * unit) - residual) / 1e-5 for unit in np.eye(prior)], axis=1)
        weights = np.minimum(1, HUBER / np.maximum(np.abs(residual), 1e-12))
        weights[-prior:] = 1
        normal, gradient = jacobian.T @ (weights[:, None] * jacobian), jacobian.T @ (weights * residual)
        while damping < 1e12:
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            tried = residuals(theta + np.clip(move, -1, 1))
            if (now := _loss(tried, prior)) < loss:
                break
            damping *= 4
        else:
            break
        theta, residual, gained, loss, damping = theta + np.clip(move, -1, 1), tried, loss - now, now, damping / 6
        if gained < 1e-7 * loss:
            break
    return dict(zip(family.names, np.exp(theta).tolist(), strict=True))


def _loss(residual: Array, prior: int) -> float:
    far = np.abs(residual)
    each = np.where(far < HUBER, residual**2 / 2, HUBER * (far - HUBER / 2))
    each[-prior:] = residual[-prior:] ** 2 / 2
    return float(each.sum())


@dataclass(frozen=True)
class Correction:
    """A Gaussian process over residuals.

    Attributes:
        features: shapes of the measurements, [n, 6].
        weights: the solved residuals, [n].
        inverse: the inverse of their covariance, [n, n].
        spread: standard deviation of residuals away from measurements.
        noise: scatter that no shape explains.
    """

    features: Array
    weights: Array
    inverse: Array
    spread: float
    noise: float

    @classmethod
    def of(cls, features: Array, residuals: Array, spread: float | None = None) -> Correction:
        """Condition the process on residuals log(measured / predicted), [n]."""
        usual = spread or float(max(np.sqrt(np.mean(np.minimum(residuals**2, 0.3**2))), 0.02))
        noise = max(0.015, 0.25 * usual)
        inverse = np.linalg.inv(usual**2 * _alike(features, features) + noise**2 * np.eye(len(features)))
        return cls(features, np.asarray(inverse @ residuals, float), np.asarray(inverse, float), usual, noise)

    def at(self, features: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of the residual at shapes, both [m]."""
        across = self.spread**2 * _alike(features, self.features)
        known = np.einsum("ij,jk,ik->i", across, self.inverse, across)
        return across @ self.weights, np.sqrt(np.maximum(self.spread**2 - known, 0) + self.noise**2)


def _alike(first: Array, second: Array) -> Array:
    apart = np.sqrt((((first[:, None, :] - second[None, :, :]) / LENGTHS) ** 2).sum(2))
    scaled = math.sqrt(3) * apart
    return (1 + scaled) * np.exp(-scaled)


def predicted(family: str, values: Values, x: Points) -> Array:
    """Return a family's times in microseconds for given parameters, [n]."""
    return FAMILIES[family].seconds(values, x)
