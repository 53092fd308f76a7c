"""One step that moves points towards others along the gradient of their transport cost by OTT."""

from functools import cache

import jax
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn


def step(points, target):
    """Return the points moved, and the regularized cost of the transport."""

    def cost(points):
        geometry = pointcloud.PointCloud(points, target, epsilon=0.1)
        solver = sinkhorn.Sinkhorn(min_iterations=0, max_iterations=20)
        return solver(linear_problem.LinearProblem(geometry)).reg_ot_cost

    value, gradient = jax.value_and_grad(cost)(points)
    return points - 0.5 * gradient, value


@cache
def model():
    """Return the step and its arguments."""
    points, target = jax.random.normal(jax.random.key(0), (2, 6, 2))
    return step, (points, target + 1.0)
