"""Log-probabilities and translations that other toolkits computed for their own checkpoints."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

REPOSITORY = Path(__file__).parents[2]
CHECKPOINTS = Path(
    os.environ.get("VANILLA_TRANSFORMER_CHECKPOINTS", REPOSITORY.parent / "shared/checkpoints")
)


def checkpoint_folder(variant):
    """The folder of a variant, such as "fairseq/post"; skips the test without test data."""
    folder = CHECKPOINTS / variant
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: it is test data that no package contains")
    return folder


def load_reference(variant):
    """(tensors, notes) of a variant."""
    folder = checkpoint_folder(variant)
    notes = json.loads((folder / "reference.json").read_text())
    return load_file(folder / "reference.safetensors"), notes


def expect_reference(folder, variant, tolerance=None):
    """A converted model gives the same as the toolkit: the ids of a text, the log-probability of
    every token at each position, also in padded rows, and the greedy translations.

    Args:
        folder: The converted model.
        variant: Such as "fairseq/post".
        tolerance: Of log-probabilities, which are computed in float64; by default 2e-6 where the
            toolkit's own are in float64, else 1e-5.
    """
    tensors, notes = load_reference(variant)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float64").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expect_token_ids(tokenizer, tensors, notes)
    difference = log_probability_difference(model, tensors)
    if tolerance is None:
        tolerance = 2e-6 if tensors["log_probs"].dtype == torch.float64 else 1e-5
    assert difference < tolerance, f"{variant}: log-probabilities differ by {difference:.2e}"
    assert greedy_texts(folder, notes["source_texts"]) == notes["greedy"]["texts"]


def expect_token_ids(tokenizer, tensors, notes):
    """Text becomes the toolkit's ids, on both sides."""
    sources = tokenizer(notes["source_texts"])["input_ids"]
    assert sources == unpadded(tensors["source_ids"], tensors["source_lengths"])
    targets = tokenizer(text_target=notes["target_texts"])["input_ids"]
    assert targets == unpadded(tensors["target_ids"], tensors["target_lengths"])


def unpadded(ids, lengths):
    return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]


def mask_of(lengths, ids):
    return (torch.arange(ids.shape[1]) < lengths[:, None]).long()


@torch.no_grad()
def log_probabilities(model, tensors):
    """Of each token of the toolkit's vocabulary at each position: (rows, length, tokens)."""
    source_mask = mask_of(tensors["source_lengths"], tensors["source_ids"])
    targets = tensors["target_ids"]
    inputs = tensors.get("decoder_input_ids")
    if inputs is None:  # the decoder starts from a zero vector, a token of ours
        start = torch.full_like(targets[:, :1], model.config.decoder_start_token_id)
        inputs = torch.cat([start, targets[:, :-1]], dim=1)
    # Ids of padding are arbitrary.
    source = torch.where(source_mask == 1, tensors["source_ids"], model.config.pad_token_id)
    logits = model(input_ids=source, attention_mask=source_mask, decoder_input_ids=inputs).logits
    return logits.log_softmax(-1)[..., : tensors["log_probs"].shape[-1]]


def log_probability_difference(model, tensors):
    """The largest difference in a batch, and in each of its rows by itself."""
    is_target = mask_of(tensors["target_lengths"], tensors["target_ids"]).bool()
    expected = tensors["log_probs"].double()[is_target]
    batch = log_probabilities(model, tensors)[is_target]
    rows = []
    for index, length in enumerate(tensors["source_lengths"]):
        row = {name: tensor[index : index + 1] for name, tensor in tensors.items()}
        row["source_ids"] = row["source_ids"][:, :length]
        rows.append(log_probabilities(model, row)[is_target[index : index + 1]])
    differences = [(found - expected).abs().max() for found in (batch, torch.cat(rows))]
    return max(difference.item() for difference in differences)


def expect_to_train_on(model, batch, expected):
    """The loss of a batch is the toolkit's, and 20 steps lower it."""
    assert model.eval()(**batch).loss.item() == pytest.approx(expected.item(), abs=1e-5)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model.train()(**batch).loss
        loss.backward()
        optimizer.step()
    assert model.eval()(**batch).loss < 0.9 * expected


def greedy_texts(folder, texts):
    """Translations of a batch, in float32 as the toolkits compute them."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    output = model.generate(**batch, num_beams=1, do_sample=False)
    return tokenizer.batch_decode(output, skip_special_tokens=True)
