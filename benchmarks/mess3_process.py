"""The Mess3 process: a hidden Markov chain of three states and three tokens, and its optimal predictions.

A token tells the state that the chain has gone to, but not surely. Whoever has seen some tokens holds a
*belief*, a distribution over the three states, and the beliefs of all histories lie on a fractal in the
triangle of distributions. (Marzen and Crutchfield, "Nearly maximally predictive features and their
dimensions", 2017; as a task for transformers: Shai et al., arXiv:2405.15943.)
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

STATES = TOKENS = 3
ALPHA, X = 0.85, 0.05
CONTEXT = 10  # tokens that a model sees at most
EVALUATED = 4096  # sequences run at once


class Mess3:
    """The process with its usual two parameters; all is float64.

    Args:
        alpha: The probability that the token names the state gone to; each other token has (1 - alpha) / 2.
        x: The probability of going to each of the two other states; 1 - 2 x of staying.
    """

    def __init__(self, alpha: float = ALPHA, x: float = X) -> None:
        if not (0 < alpha < 1 and 0 < x < 0.5):
            raise ValueError(f"alpha {alpha} is not between 0 and 1, or x {x} not between 0 and 1/2")
        same = torch.eye(STATES, dtype=torch.float64)
        self.transition = (1 - 3 * x) * same + x  # [from, to]
        self.emission = (3 * alpha - 1) / 2 * same + (1 - alpha) / 2  # [to, token]
        # operators[z, i, j] = P(token z, state j | state i)
        self.operators = self.transition[None] * self.emission.T[:, None, :]
        self.stationary = torch.full((STATES,), 1 / STATES, dtype=torch.float64)

    def beliefs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Beliefs [sequences, positions, states] after each of the tokens [sequences, positions].

        The forward algorithm from the stationary distribution: `belief T_z`, normalised.
        """
        belief = self.stationary.expand(len(tokens), STATES)
        after = []
        for column in tokens.T:
            belief = torch.einsum("si,sij->sj", belief, self.operators[column])
            belief = belief / belief.sum(1, keepdim=True)
            after.append(belief)
        return torch.stack(after, dim=1)

    def predictions(self, beliefs: torch.Tensor) -> torch.Tensor:
        """Bayes-optimal probabilities of the next token [..., tokens] of beliefs [..., states]."""
        return torch.einsum("...i,zij->...z", beliefs, self.operators)

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Tokens, int64 [sequences, length], from the stationary distribution on."""
        state = torch.randint(STATES, (sequences,), generator=generator)
        tokens = []
        for _ in range(length):
            state = torch.multinomial(self.transition[state], 1, generator=generator).squeeze(1)
            tokens.append(torch.multinomial(self.emission[state], 1, generator=generator).squeeze(1))
        return torch.stack(tokens, dim=1)

    def histories(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Every sequence of tokens, int64 [3^length, length], and its probability, float64 [3^length]."""
        tokens = torch.tensor(list(itertools.product(range(TOKENS), repeat=length)))
        weights = self.stationary.expand(len(tokens), STATES)
        for column in tokens.T:
            weights = torch.einsum("si,sij->sj", weights, self.operators[column])
        return tokens, weights.sum(1)

    def optimal_loss(self, length: int) -> torch.Tensor:
        """Nats, float64 [length]: the mean entropy of the next token after 1, 2, ... tokens, exact.

        It falls towards the entropy rate of the process.
        """
        tokens, weights = self.histories(length)
        p = self.predictions(self.beliefs(tokens))
        return torch.einsum("s,spz->p", weights, -p * p.log())


@torch.no_grad()
def excess_loss(process: Mess3, model: Any, length: int = CONTEXT) -> torch.Tensor:
    """How much the model loses to the optimum, nats, float64 [length], exact over every history."""
    tokens, weights = process.histories(length)
    excess = torch.zeros(length, dtype=torch.float64)
    for rows, weight in zip(tokens.split(EVALUATED), weights.split(EVALUATED), strict=True):
        log_p = model(input_ids=rows, use_cache=False).logits.double().log_softmax(-1)
        best = process.predictions(process.beliefs(rows))
        excess += torch.einsum("s,spz->p", weight, best * (best.log() - log_p))
    return excess
