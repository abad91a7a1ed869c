"""Libraries for any torch or transformers model work with ours. They are skipped unless these are
installed: captum, inseq, nnsight, lightning, optuna, optimum-quanto.
"""

import pytest
import torch
from conftest import random_ids, seq2seq, small_config, small_trainer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenization import train_tokenizer

TEXT, TRANSLATION = "The lake is deep.", "Der See ist tief."


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT, TRANSLATION], 300, show_progress=False)


def test_captum_attributes_a_probability_to_the_source_tokens():
    """Integrated gradients are complete: they add up to what the source changes."""
    attr = pytest.importorskip("captum.attr")
    model = seq2seq().eval()
    source, nothing = random_ids(1, 6), torch.full((1, 6), model.config.eos_token_id)
    target = random_ids(1, 3)

    def probabilities(ids):
        prefix = target.expand(len(ids), -1)
        return model(input_ids=ids, decoder_input_ids=prefix).logits[:, -1].softmax(-1)

    embedding = model.get_encoder().get_input_embeddings()
    shares = attr.LayerIntegratedGradients(probabilities, embedding).attribute(
        source, baselines=nothing, target=9, n_steps=100
    )
    change = (probabilities(source) - probabilities(nothing))[0, 9]
    assert shares.shape == (1, 6, model.config.d_model)
    torch.testing.assert_close(shares.sum().float(), change.detach(), atol=1e-6, rtol=1e-2)


@pytest.mark.parametrize("method", ["attention", "input_x_gradient"])
def test_inseq_attributes_each_token_of_a_translation(tokenizer, method):
    inseq = pytest.importorskip("inseq")
    model = seq2seq(vocab_size=len(tokenizer)).eval()
    model.set_attn_implementation("eager")  # as inseq loads models itself, for their weights
    known = inseq.load_model(model, method, tokenizer=tokenizer)
    found = known.attribute(TEXT, TRANSLATION, show_progress=False)
    (one,) = found.sequence_attributions
    assert [token.id for token in one.source] == tokenizer(TEXT)["input_ids"]
    assert [token.id for token in one.target][1:] == tokenizer(TRANSLATION)["input_ids"]
    assert one.source_attributions.shape[:2] == (len(one.source), len(one.target) - 1)
    assert one.source_attributions.isfinite().all()


def test_inseq_attributes_what_the_model_predicts(tokenizer):
    """It multiplies embeddings by an `embed_scale` that it finds: the model must not do so too."""
    inseq = pytest.importorskip("inseq")
    model = seq2seq(vocab_size=len(tokenizer)).eval()
    known = inseq.load_model(model, "saliency", tokenizer=tokenizer)
    found = known.attribute(
        TEXT, TRANSLATION, step_scores=["probability"], show_progress=False
    ).sequence_attributions[0]
    labels = torch.tensor([tokenizer(TRANSLATION)["input_ids"]])
    logits = model(input_ids=torch.tensor([tokenizer(TEXT)["input_ids"]]), labels=labels).logits
    expected = logits.softmax(-1).gather(-1, labels[..., None]).flatten()
    torch.testing.assert_close(found.step_scores["probability"], expected.detach())


def test_the_model_has_no_embed_scale_that_inseq_would_use():
    assert not any(hasattr(module, "embed_scale") for module in seq2seq().modules())


def test_nnsight_reads_and_changes_what_a_layer_returns():
    nnsight = pytest.importorskip("nnsight")
    model = seq2seq().eval()
    traced = nnsight.NNsight(model)
    inputs = {"input_ids": random_ids(2, 6), "decoder_input_ids": random_ids(2, 4)}
    with traced.trace(**inputs):
        states = traced.model.encoder.layers[0].output.save()
        logits = traced.lm_head.output.save()
    output = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(states, output.encoder_hidden_states[1])
    torch.testing.assert_close(logits, output.logits)
    with traced.trace(**inputs):
        traced.model.encoder.layers[0].output[:] = 0
        changed = traced.lm_head.output.save()
    assert not torch.allclose(changed, output.logits, atol=1e-3)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lightning_trains_and_loads_a_module_that_holds_a_model(tmp_path, precision):
    lightning = pytest.importorskip("lightning")

    class Translator(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.losses = []
            self.model = VanillaTransformerForConditionalGeneration(small_config())

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    rows = [{"input_ids": ids, "labels": ids} for ids in random_ids(32, 5)]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_steps=16, accelerator="cpu", precision=precision, default_root_dir=tmp_path, **quiet
    )
    trained = Translator()
    trainer.fit(trained, torch.utils.data.DataLoader(rows, batch_size=8))
    assert trained.losses[-1] < trained.losses[0]
    loaded = Translator.load_from_checkpoint(trainer.checkpoint_callback.best_model_path).model
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    for name, weight in trained.model.state_dict().items():
        assert loaded.state_dict()[name].equal(weight.to(loaded.dtype)), name


@pytest.mark.parametrize(
    "batches", [{"max_tokens": 12}, {"per_device_train_batch_size": 2}], ids=str
)
def test_optuna_searches_for_options(tokenizer, tmp_path, batches):
    """Each trial trains a new model, in a separate folder."""
    optuna = pytest.importorskip("optuna")
    rates = [1e-9, 1e-2]
    options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2, "save_strategy": "steps"}
    trainer = small_trainer(tmp_path, tokenizer, **options, **batches)
    trained = []

    def model_init(trial):
        torch.manual_seed(0)
        trained.append(seq2seq(vocab_size=len(tokenizer)))
        return trained[-1]

    trainer.model_init = model_init
    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
        n_trials=4,
        backend="optuna",
        sampler=optuna.samplers.GridSampler({"learning_rate": rates}),
    )
    assert best.hyperparameters == {"learning_rate": 1e-2}
    assert len(trained) == 2
    assert sorted(path.name for path in tmp_path.glob("run-*/*")) == ["checkpoint-2"] * 2


@pytest.mark.parametrize("bits", ["qint4", "qint8"])
def test_quanto_rounds_weights_of_a_model_that_generates(bits):
    """torch's inference mode does not support quanto's 4-bit tensors."""
    quanto = pytest.importorskip("optimum.quanto")
    model, source = seq2seq(d_model=64).eval(), random_ids(2, 6)
    quanto.quantize(model, weights=getattr(quanto, bits), exclude="lm_head")
    quanto.freeze(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    found = model.generate(source, max_new_tokens=5)
    model.set_attn_implementation("eager")
    assert found.tolist() == model.generate(source, max_new_tokens=5).tolist()
