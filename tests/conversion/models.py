"""Models of ours that tests write in another toolkit's format: they must be the same after
conversion."""

import torch
from conftest import ragged, random_ids, seq2seq
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from conversion.reference import load_reference, mask_of
from vanilla_transformer.conversion.weights import separate_halves


def random_model(**config):
    """A model in which every tensor is random, so that no two can be confused."""
    model = seq2seq(**config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.3 + ("layer_norm.weight" in name))
    return model


def split_state(model):
    """Copies of a model's tensors, without duplicate names of tied ones."""
    return {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }


def embeddings(model):
    """Source embedding, target embedding and projection, tied or not."""
    model = model.model, model.lm_head
    return [
        each.weight.detach().clone()
        for each in (model[0].encoder.embed_tokens, model[0].decoder.embed_tokens, model[1])
    ]


def to_halves(weights):
    """Columns with all sines first, as most toolkits have them; the inverse of the converters'."""
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    separate_halves(weights)
    return weights


@torch.no_grad()
def expect_same(folder, model, start=None, constant=None):
    """The converted model has the log-probabilities of `model` in double precision.

    Args:
        folder: The converted model.
        model: Ours.
        start: With "zero", the decoder starts from a zero vector.
        constant: A vector that is added to the scaled embedding of each source token.
    """
    converted = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float64").eval()
    model = model.double()
    sources, mask = ragged(7, 4)
    targets = random_ids(2, 6, model.config.target_vocab_size)
    scale = model.config.d_model**0.5
    source = model.model.encoder.embed_tokens(sources)
    target = model.model.decoder.embed_tokens(targets)
    if constant is not None:
        source = source + constant.double() / scale
    decoder_inputs = targets
    if start == "zero":
        target = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], dim=1)
        begin = torch.full_like(targets[:, :1], converted.config.decoder_start_token_id)
        decoder_inputs = torch.cat([begin, targets[:, :-1]], dim=1)
    expected = model(
        inputs_embeds=source, attention_mask=mask, decoder_inputs_embeds=target
    ).logits.log_softmax(-1)
    found = converted(
        input_ids=sources, attention_mask=mask, decoder_input_ids=decoder_inputs
    ).logits.log_softmax(-1)
    torch.testing.assert_close(found[..., : expected.shape[-1]], expected, rtol=0, atol=2e-6)


def expect_training_to_go_on(folder, variant):
    """The loss of the toolkit's own batch is the toolkit's, and falls from there."""
    tensors, notes = load_reference(variant)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float32").eval()
    texts = notes["source_texts"], notes["target_texts"]
    batch = tokenizer(texts[0], text_target=texts[1], padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    is_target = mask_of(tensors["target_lengths"], tensors["target_ids"]).bool()
    gold = tensors["log_probs"].gather(-1, tensors["target_ids"][..., None])[..., 0]
    losses = []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(5):
        loss = model(**batch).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert abs(losses[0] + gold[is_target].mean().item()) < 1e-4
    assert losses[-1] < losses[0]
