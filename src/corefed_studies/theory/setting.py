"""The numbers that the theory is asked about, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from corefed.base.errors import UserError
from corefed_studies.theory import quantities
from corefed_studies.theory.quantities import above, at_least, whole_from_one
from corefed_studies.theory.theorems import ONES, Constants, ordered


@dataclass(frozen=True)
class TheorySetting:
    """A network, a data size, a class of functions. Every field has a default."""

    n: int = 5000
    """Points per client."""
    n_k: int = 500
    """Points of its coreset."""
    s_0: int = 20
    """Inputs of the network."""
    L: int = 1
    """Hidden layers."""
    M: int = 20
    """Their width."""
    parameters: float | None = None
    """T; that of the network if not given."""
    beta: float = 1.0
    """Smoothness of the true functions."""
    Lambda: float = 2.0
    """Intrinsic dimension of the inputs."""
    zeta: float = 1.0
    """Weight of the KL."""
    delta: float = 1.1
    """Power of the logarithm in epsilon_n."""
    F: float = 1.0
    """Bound of true functions and networks."""
    sigma: float = 0.1
    """Standard deviation of the noise."""
    Omega: float = 1.0
    """Bound of the network's weights."""
    N: int = 10
    """Clients."""
    constants: Constants = ONES
    """C, C', C'', C_0 .. C_3."""

    def __post_init__(self) -> None:
        whole_from_one(n=self.n, n_k=self.n_k, s_0=self.s_0, L=self.L, M=self.M, N=self.N)
        ordered(self.n, self.n_k)
        at_least(1, T=self.parameter_count, Lambda=self.Lambda)
        above(1, delta=self.delta)
        above(0, beta=self.beta, zeta=self.zeta, F=self.F, sigma=self.sigma, Omega=self.Omega)
        above(0, **self.constants._asdict())
        if self.Lambda > self.s_0:
            raise UserError(
                f"Lambda is {self.Lambda:g}; the intrinsic dimension is at most s_0 = {self.s_0}, "
                "the number of inputs."
            )

    @property
    def parameter_count(self) -> float:
        """T: as given, or of the network."""
        if self.parameters is None:
            return quantities.network_parameters(self.s_0, self.L, self.M)
        return self.parameters

    @property
    def fraktur_g(self) -> float:
        """G, the constant of Lemma 2."""
        return float(quantities.fraktur_g(self.parameter_count, self.s_0, self.L, self.M))

    @property
    def xi(self) -> float:
        """Bound of the approximation error."""
        return float(
            quantities.xi_bound(self.parameter_count, self.beta, self.Lambda, self.constants.C_0)
        )

    @property
    def bound_arguments(self) -> tuple[float, float, float, float, float, Constants]:
        """T, G, delta, xi, zeta and the constants: what every bound takes after its sizes."""
        return (
            self.parameter_count,
            self.fraktur_g,
            self.delta,
            self.xi,
            self.zeta,
            self.constants,
        )

    @property
    def delta_prime(self) -> float:
        """delta' of Theorem 2: the least that its proof allows, delta + 1/2."""
        return self.delta + 0.5

    @property
    def log_a(self) -> float:
        """log A of Assumption 3."""
        return quantities.log_a(self.s_0, self.L, self.M, self.Omega)
