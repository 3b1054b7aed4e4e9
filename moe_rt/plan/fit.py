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

P95 = 1.645  # standard deviations from the median to the 95th percentile
STEPS = 150
HUBER = 2.5  # residuals beyond this many times the family's noise count linearly
# Distances, in powers of two, over which residuals are alike: tokens, row bytes, topk, experts, ranks, SMs.
LENGTHS = np.array([2.0, 1.0, 1.0, 1.5, 1.0, 0.5])


def fit(family: Family, x: Points, measured_us: Array, usual: Values | None = None) -> dict[str, float]:
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
        return np.concatenate(
            [(np.log(np.maximum(predicted, 1e-9)) - target) / family.noise, (theta - centre) / spread]
        )

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


def uncertainty(family: Family, values: Values, x: Points, measured_us: Array) -> Array:
    """Return the covariance of the logarithms of fitted parameters, [parameters, parameters].

    It is that of a normal law at the fit (Laplace). What the formula leaves over is alike for similar shapes, so it
    counts as if it were twice as large.

    Args:
        x, measured_us: shapes and times of the fit, n points.
    """
    left = np.log(measured_us / family.seconds(values, x))
    scatter = 2 * max(float(np.sqrt(np.mean(np.minimum(left**2, 0.3**2)))), family.noise)
    slopes = slopes_of(family, values, x) / scatter
    return np.linalg.inv(slopes.T @ slopes + np.diag([p.spread**-2 for p in family.parameters]))


def slopes_of(family: Family, values: Values, x: Points, step: float = 1e-4) -> Array:
    """Return how the logarithm of each time changes with the logarithm of each parameter, [n, parameters]."""
    at = np.log(family.seconds(values, x))
    moved = (np.log(family.seconds(dict(values) | {n: values[n] * math.exp(step)}, x)) for n in family.names)
    return np.stack([(other - at) / step for other in moved], axis=1)


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
        trust: factor of the deviations with which nine of ten measurements, each left out in turn, are inside p5 to
            p95.
    """

    features: Array
    weights: Array
    inverse: Array
    spread: float
    noise: float
    trust: float

    @classmethod
    def of(cls, features: Array, residuals: Array, scatter: float = 0.03) -> Correction:
        """Condition the process on residuals log(measured / predicted), [n], of measurements with this scatter."""
        usual = float(max(np.sqrt(np.mean(np.minimum(residuals**2, 0.3**2))), 0.02))
        noise = max(0.5 * scatter, 0.25 * usual)
        inverse = np.linalg.inv(usual**2 * _alike(features, features) + noise**2 * np.eye(len(features)))
        weights = np.asarray(inverse @ residuals, float)
        left_out = np.abs(weights) / np.sqrt(np.diag(inverse))  # in deviations, for each measurement without itself
        trust = float(np.clip(np.quantile(left_out, 0.9) / P95, 0.4, 3.0))
        return cls(features, weights, np.asarray(inverse, float), usual, noise, trust)

    def at(self, features: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of the residual at shapes, both [m]."""
        across = self.spread**2 * _alike(features, self.features)
        known = np.einsum("ij,jk,ik->i", across, self.inverse, across)
        deviation = np.sqrt(np.maximum(self.spread**2 - known, 0) + self.noise**2)
        return across @ self.weights, self.trust * deviation

    def near(self, features: Array) -> Array:
        """Return how much of each shape's residual the measurements decide, 0 to 1, [m]."""
        across = _alike(features, self.features) * self.spread
        return np.clip(np.einsum("ij,jk,ik->i", across, self.inverse, across), 0, 1)


def _alike(first: Array, second: Array) -> Array:
    apart = np.sqrt((((first[:, None, :] - second[None, :, :]) / LENGTHS) ** 2).sum(2))
    scaled = math.sqrt(3) * apart
    return (1 + scaled) * np.exp(-scaled)


def predicted(family: str, values: Values, x: Points) -> Array:
    """Return a family's times in microseconds for given parameters, [n]."""
    return FAMILIES[family].seconds(values, x)
