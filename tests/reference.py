"""The paper's formulas in plain NumPy, section by section: the reference for tests of the model.

"Attention Is All You Need" (Vaswani et al., 2017), https://arxiv.org/abs/1706.03762. One sentence
at a time and without dropout, so there is no batch, no padding, and no mask except the decoder's.

n is the number of positions in the source or, in a stack alone, in its sentence; m is that of the
target; V tokens make a vocabulary; N, h, d_model, d_ff, d_k and d_v are the paper's.

Weights are arrays under the model's names for them, without "model.". A linear layer's matrix is
stored transposed: the paper's W is `weight.T`. Biases in attention, d_k apart from d_model / h,
pre-norm and learned positions are used if the weights or the `Stack` have them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
Weights = dict[str, np.ndarray]


def under(weights: Weights, prefix: str) -> Weights:
    """The weights of one part, under their names within it."""
    prefix += "."
    return {k.removeprefix(prefix): W for k, W in weights.items() if k.startswith(prefix)}


def relu(X: Array) -> Array:
    return np.maximum(0, X)


@dataclass(frozen=True)
class Stack:
    """What does not follow from the weights of an encoder or decoder: N layers with h heads, and so
    on."""

    N: int
    h: int
    pre_norm: bool = False
    activation: Callable[[Array], Array] = relu
    epsilon: float = 1e-6


# ---------------------------------------------------------------- 3.1 Encoder and decoder stacks


def layer_norm(X: Array, weights: Weights, epsilon: float) -> Array:
    """Ba et al. (2016): each row to mean 0 and variance 1, times gain plus bias. X (n, d_model)."""
    mean = X.mean(axis=1, keepdims=True)
    variance = ((X - mean) ** 2).mean(axis=1, keepdims=True)
    return (X - mean) / np.sqrt(variance + epsilon) * weights["weight"] + weights["bias"]


def residual(
    X: Array, name: str, layer: Weights, stack: Stack, sublayer: Callable[[Array, Weights], Array]
) -> Array:
    """3.1: "the output of each sub-layer is LayerNorm(x + Sublayer(x))", X (n, d_model).

    Pre-norm, which the paper does not have, is x + Sublayer(LayerNorm(x)).
    """
    weights, norm = under(layer, name), under(layer, f"{name}_layer_norm")
    if stack.pre_norm:
        return X + sublayer(layer_norm(X, norm, stack.epsilon), weights)
    return layer_norm(X + sublayer(X, weights), norm, stack.epsilon)


def encoder_layer(X: Array, layer: Weights, stack: Stack) -> Array:
    """3.1: self-attention, then a feed-forward network. X (n, d_model)."""

    def self_attention(X: Array, weights: Weights) -> Array:
        return multi_head_attention(X, X, X, weights, stack.h)

    def network(X: Array, weights: Weights) -> Array:
        return feed_forward(X, weights, stack.activation)

    X = residual(X, "self_attn", layer, stack, self_attention)
    return residual(X, "ffn", layer, stack, network)


def decoder_layer(Y: Array, layer: Weights, stack: Stack, Z: Array | None) -> Array:
    """3.1: masked self-attention, attention to the encoder's output Z (n, d_model) where there is
    one, then a feed-forward network. Y (m, d_model)."""

    def self_attention(Y: Array, weights: Weights) -> Array:
        return multi_head_attention(Y, Y, Y, weights, stack.h, causal_mask(len(Y)))

    def encoder_decoder_attention(Y: Array, weights: Weights) -> Array:
        return multi_head_attention(Y, Z, Z, weights, stack.h)

    def network(Y: Array, weights: Weights) -> Array:
        return feed_forward(Y, weights, stack.activation)

    Y = residual(Y, "self_attn", layer, stack, self_attention)
    if Z is not None:
        Y = residual(Y, "encoder_attn", layer, stack, encoder_decoder_attention)
    return residual(Y, "ffn", layer, stack, network)


def encoder(X: Array, weights: Weights, stack: Stack) -> Array:
    """3.1: N identical layers, and in pre-norm a last norm. X (n, d_model)."""
    for i in range(stack.N):
        X = encoder_layer(X, under(weights, f"layers.{i}"), stack)
    return layer_norm(X, under(weights, "layer_norm"), stack.epsilon) if stack.pre_norm else X


def decoder(Y: Array, weights: Weights, stack: Stack, Z: Array | None = None) -> Array:
    """3.1: the same of decoder layers. Y (m, d_model), Z (n, d_model)."""
    for i in range(stack.N):
        Y = decoder_layer(Y, under(weights, f"layers.{i}"), stack, Z)
    return layer_norm(Y, under(weights, "layer_norm"), stack.epsilon) if stack.pre_norm else Y


# ---------------------------------------------------------------- 3.2 Attention


def softmax(X: Array) -> Array:
    """Over each row, which can contain -inf, but not only -inf."""
    exponentials = np.exp(X - X.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def causal_mask(m: int) -> Array:
    """3.2.3: "each position in the decoder" sees "all positions up to and including that position":
    True where row i may see column j, (m, m)."""
    return np.tril(np.ones((m, m), dtype=bool))


def attention(Q: Array, K: Array, V: Array, mask: Array | None = None) -> Array:
    """3.2.1, equation (1): softmax(Q K^T / sqrt(d_k)) V, (m, d_v), "setting to -inf" what must not
    be seen. Q (m, d_k), K (n, d_k), V (n, d_v), mask (m, n)."""
    d_k = Q.shape[1]
    scores = Q @ K.T / math.sqrt(d_k)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    return softmax(scores) @ V


def multi_head_attention(
    Q: Array, K: Array, V: Array, weights: Weights, h: int, mask: Array | None = None
) -> Array:
    """3.2.2: Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Q (m, d_model), K and V (n, d_model); W_i^Q and W_i^K (d_model, d_k), W_i^V (d_model, d_v),
    W^O (h d_v, d_model).
    """

    def split(name: str) -> list[tuple[Array, Array]]:
        W = weights[f"{name}.weight"].T
        b = weights.get(f"{name}.bias", np.zeros(W.shape[1]))
        return list(zip(np.split(W, h, axis=1), np.split(b, h), strict=True))

    heads = []
    for (W_Q, b_Q), (W_K, b_K), (W_V, b_V) in zip(
        split("q_proj"), split("k_proj"), split("v_proj"), strict=True
    ):
        heads.append(attention(Q @ W_Q + b_Q, K @ W_K + b_K, V @ W_V + b_V, mask))
    W_O, b_O = weights["out_proj.weight"].T, weights.get("out_proj.bias", 0)
    return np.concatenate(heads, axis=1) @ W_O + b_O


# ---------------------------------------------------------------- 3.3 Feed-forward networks


def feed_forward(X: Array, weights: Weights, activation: Callable[[Array], Array] = relu) -> Array:
    """3.3, equation (2): max(0, x W_1 + b_1) W_2 + b_2. X (n, d_model), W_1 (d_model, d_ff)."""
    W_1, b_1 = weights["fc1.weight"].T, weights["fc1.bias"]
    W_2, b_2 = weights["fc2.weight"].T, weights["fc2.bias"]
    return activation(X @ W_1 + b_1) @ W_2 + b_2


# ---------------------------------------------------------------- 3.4 Embeddings and softmax


def matrix(weights: Weights, own: str) -> Array:
    """The (V, d_model) matrix that source, target and projection share, or else their own."""
    return weights["shared.weight"] if "shared.weight" in weights else weights[own]


def embed(tokens: Array, E: Array) -> Array:
    """3.4: "we multiply those weights by sqrt(d_model)". tokens (n,), E (V, d_model)."""
    d_model = E.shape[1]
    return E[tokens] * math.sqrt(d_model)


def project(Y: Array, E: Array) -> Array:
    """3.4: the "pre-softmax linear transformation", (m, V), by the embeddings, which are not
    multiplied here. Y (m, d_model), E (V, d_model)."""
    return Y @ E.T


# ---------------------------------------------------------------- 3.5 Positional encoding


def positional_encoding(n: int, d_model: int) -> Array:
    """3.5: PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos of the same."""
    PE = np.zeros((n, d_model))
    for pos in range(n):
        for i in range(d_model // 2):
            angle = pos / 10000 ** (2 * i / d_model)
            PE[pos, 2 * i], PE[pos, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return PE


# ---------------------------------------------------------------- Figure 1


def stack_input(tokens: Array, E: Array, weights: Weights) -> Array:
    """3.5: embeddings plus positions, (n, d_model); learned ones in row (E) of Table 3."""
    X = embed(tokens, E)
    if "embed_positions.weight" in weights:
        return X + weights["embed_positions.weight"][: len(tokens)]
    return X + positional_encoding(*X.shape)


def encode(source: Array, weights: Weights, stack: Stack) -> Array:
    """Figure 1, left: source (n,) to Z (n, d_model)."""
    E, part = matrix(weights, "encoder.embed_tokens.weight"), under(weights, "encoder")
    return encoder(stack_input(source, E, part), part, stack)


def decode(target: Array, weights: Weights, stack: Stack, Z: Array | None = None) -> Array:
    """Figure 1, right, up to the softmax: target (m,), shifted right, to logits (m, V). Embedding
    and projection are one matrix unless there is an "lm_head"."""
    E, part = matrix(weights, "decoder.embed_tokens.weight"), under(weights, "decoder")
    Y = decoder(stack_input(target, E, part), part, stack, Z)
    return project(Y, weights.get("lm_head.weight", E))


# ---------------------------------------------------------------- 5.3 Optimizer


def learning_rate(step: int, d_model: int, warmup_steps: int = 4000) -> float:
    """5.3, equation (3): d_model^-0.5 min(step^-0.5, step warmup_steps^-1.5)."""
    return d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


# ---------------------------------------------------------------- 5.4 Regularization


def smoothed_target(label: int, V: int, epsilon: float) -> Array:
    """5.4, after Szegedy et al. (2015): (1 - epsilon) on the label and epsilon / V on each of the
    V tokens, the label among them."""
    target = np.full(V, epsilon / V)
    target[label] += 1 - epsilon
    return target


def token_losses(logits: Array, labels: Array, epsilon: float) -> Array:
    """5.4: the cross-entropy -sum q log p of each position, (m,). logits (m, V), labels (m,)."""
    losses = []
    for row, label in zip(logits, labels, strict=True):
        log_p = row - row.max() - math.log(np.exp(row - row.max()).sum())
        losses.append(-(smoothed_target(label, len(row), epsilon) * log_p).sum())
    return np.array(losses)


# ---------------------------------------------------------------- 6.1 Machine translation


def length_penalty(length: int, alpha: float) -> float:
    """6.1, after Wu et al. (2016), equation (14): ((5 + |Y|) / 6)^alpha."""
    return ((5 + length) / 6) ** alpha
