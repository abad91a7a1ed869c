"""Train small models with other toolkits, for `scripts.checks.toolkits`.

Each function of `TRAININGS` writes, to a folder, the files that a user of the toolkit has after
training: the checkpoint, the vocabularies, and the codes or SentencePiece models.
"""

import contextlib
import filecmp
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe
from torch import nn
from transformers import FSMTConfig, MarianConfig, MarianMTModel

from vanilla_transformer.conversion import tensor2tensor, torch_nn
from vanilla_transformer.conversion.unpickling import load_torch

SOURCE, TARGET = LANGUAGES = "de", "en"
MERGES, PIECES = 2000, 2000
WIDTH, D_FF, HEADS, LAYERS = 128, 256, 4, 2
DROPOUT, SMOOTHING, RATE, WARMUP, TOKENS, PAIRS = 0.1, 0.1, 2e-3, 60, 1000, 64
RUN = "import sys; from scripts.checks.toolkit_imports import run; run(sys.argv[1], sys.argv[2:])"


def prepare(multi30k: Path, folder: Path) -> Path:
    """The corpus with joint byte-pair codes: `train.de`, `train.bpe.de`, `codes` and so on.

    Raises:
        ValueError: The folder has another corpus, on which models were trained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    codes = folder / "codes"
    names = [file.name for file in multi30k.glob("*.??")]
    if codes.is_file():
        equal, _, _ = filecmp.cmpfiles(multi30k, folder, names, shallow=False)
        if not names or equal != names:
            raise ValueError(
                f"{folder} holds other text than {multi30k}: expected a new output_dir"
            )
        return folder
    for name in names:
        shutil.copyfile(multi30k / name, folder / name)
    both = folder / "train.both"
    both.write_bytes(b"".join((folder / f"train.{each}").read_bytes() for each in LANGUAGES))
    unfinished = folder / "codes.part"
    with both.open() as texts, unfinished.open("w") as output:
        learn_bpe(texts, output, MERGES)
    with unfinished.open() as learned:
        bpe = BPE(learned)
    for file in [*folder.glob("train.??"), *folder.glob("val.??")]:
        with file.open() as texts, (folder / f"{file.stem}.bpe{file.suffix}").open("w") as output:
            output.writelines(map(bpe.process_line, texts))
    unfinished.rename(codes)
    return folder


def run(program: str, *arguments: object) -> None:
    """Run a program of a toolkit.

    Raises:
        RuntimeError: It failed; the message ends with its output.
    """
    execute([sys.executable, "-c", RUN, program, *map(str, arguments)], program)


def execute(command: list[str], name: str) -> None:
    """Run a command that is called `name` in errors; see `run`."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def options(values: dict[str, Any]) -> list[str]:
    """Values as command-line options: True has no value, and a tuple has several."""
    pairs = [[f"--{name}"] if value is True else
             [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
             for name, value in values.items()]  # fmt: skip
    return [word for pair in pairs for word in pair]


def train_fairseq(data: Path, folder: Path, steps: int) -> None:
    """Post-norm, one matrix for all: `transformer_iwslt_de_en`, made smaller."""
    binary = folder / "binary"
    run("fairseq_cli.preprocess:cli_main", *options({
        "source-lang": SOURCE, "target-lang": TARGET, "trainpref": data / "train.bpe",
        "validpref": data / "val.bpe", "destdir": binary, "joined-dictionary": True,
    }))  # fmt: skip
    sizes = {
        f"{stack}-{name}": value
        for stack in ("encoder", "decoder")
        for name, value in (
            ("layers", LAYERS), ("embed-dim", WIDTH), ("ffn-embed-dim", D_FF),
            ("attention-heads", HEADS),
        )
    }  # fmt: skip
    run("fairseq_cli.train:cli_main", binary, *options({
        "arch": "transformer_iwslt_de_en", **sizes, "share-all-embeddings": True,
        "dropout": DROPOUT, "criterion": "label_smoothed_cross_entropy",
        "label-smoothing": SMOOTHING, "optimizer": "adam", "adam-betas": "(0.9, 0.98)",
        "lr": RATE, "lr-scheduler": "inverse_sqrt", "warmup-updates": WARMUP, "max-tokens": TOKENS,
        "max-update": steps, "save-dir": folder, "cpu": True, "no-epoch-checkpoints": True,
        "disable-validation": True, "num-workers": 0, "no-progress-bar": True, "seed": 1,
    }))  # fmt: skip
    for language in LANGUAGES:
        shutil.copyfile(binary / f"dict.{language}.txt", folder / f"dict.{language}.txt")
    shutil.copyfile(data / "codes", folder / "codes")


def train_joeynmt(data: Path, folder: Path, steps: int) -> None:
    """Pre-norm; the target embedding is the projection."""
    sides = {}
    for side, language in (("src", SOURCE), ("trg", TARGET)):
        tokens = {
            token for line in (data / f"train.bpe.{language}").open() for token in line.split()
        }
        vocabulary = data / f"joeynmt.{language}"
        vocabulary.write_text("\n".join(sorted(tokens)) + "\n")
        sides[side] = {
            "lang": language, "level": "bpe", "voc_file": str(vocabulary), "max_length": 100,
            "tokenizer_type": "subword-nmt",
            "tokenizer_cfg": {"codes": str(data / "codes"), "num_merges": MERGES},
        }  # fmt: skip
    stack = {
        "type": "transformer", "num_layers": LAYERS, "num_heads": HEADS, "hidden_size": WIDTH,
        "ff_size": D_FF, "dropout": DROPOUT, "layer_norm": "pre", "activation": "relu",
        "embeddings": {"embedding_dim": WIDTH, "scale": True, "dropout": 0.0},
    }  # fmt: skip
    config = {
        "name": "check", "joeynmt_version": "2.3.0", "model_dir": str(folder), "use_cuda": False,
        "fp16": False, "random_seed": 1,
        "data": {"train": str(data / "train"), "dev": str(data / "val"), "dataset_type": "plain",
                 "sample_dev_subset": 20, **sides},
        "testing": {"beam_size": 5, "beam_alpha": 1.0, "batch_size": 64, "max_output_length": 100},
        "training": {
            "optimizer": "adam", "adam_betas": [0.9, 0.98], "scheduling": "warmupinversesquareroot",
            "learning_rate": RATE, "learning_rate_warmup": WARMUP, "batch_size": TOKENS,
            "batch_type": "token", "normalization": "tokens", "loss": "crossentropy",
            "label_smoothing": SMOOTHING, "updates": steps, "epochs": 1000,
            "validation_freq": steps, "logging_freq": steps, "eval_metrics": ["bleu"],
            "early_stopping_metric": "loss", "model_dir": str(folder), "overwrite": True,
        },
        "model": {
            "initializer": "xavier_uniform", "embed_initializer": "xavier_uniform",
            "tied_softmax": True, "encoder": stack, "decoder": stack,
        },
    }  # fmt: skip
    file = data / "joeynmt.yaml"
    file.write_text(yaml.safe_dump(config))
    run("joeynmt.__main__:main", "train", file, "--skip-test")
    shutil.copyfile(data / "codes", folder / "codes")


def train_opennmt_py(data: Path, folder: Path, steps: int) -> None:
    """Pre-norm, with separate matrices; text goes through the transform `bpe`."""
    config = {
        "data": {
            "corpus": {"path_src": str(data / "train.de"), "path_tgt": str(data / "train.en"),
                       "transforms": ["bpe"]},
        },
        "src_subword_model": str(folder / "codes"), "tgt_subword_model": str(folder / "codes"),
        "src_vocab": str(folder / "vocab.src"), "tgt_vocab": str(folder / "vocab.tgt"),
        "save_data": str(folder / "data"), "n_sample": -1, "num_threads": 1,
    }  # fmt: skip
    training = {
        "save_model": str(folder / "model"), "save_checkpoint_steps": steps, "train_steps": steps,
        "encoder_type": "transformer", "decoder_type": "transformer", "position_encoding": True,
        "layers": LAYERS, "heads": HEADS, "hidden_size": WIDTH, "word_vec_size": WIDTH,
        "transformer_ff": D_FF, "dropout": [DROPOUT], "attention_dropout": [DROPOUT],
        "label_smoothing": SMOOTHING, "optim": "adam", "adam_beta2": 0.98, "learning_rate": 1.0,
        "decay_method": "noam", "warmup_steps": WARMUP, "batch_size": TOKENS,
        "batch_type": "tokens", "normalization": "tokens", "bucket_size": 30000, "num_workers": 0,
        "world_size": 1, "gpu_ranks": [], "seed": 1, "report_every": 50, "valid_steps": 10**6,
        "param_init_glorot": True, "param_init": 0.0,
    }  # fmt: skip
    shutil.copyfile(data / "codes", folder / "codes")
    vocabulary, file = folder / "vocabulary.yaml", folder / "config.yaml"
    vocabulary.write_text(yaml.safe_dump(config))
    run("onmt.bin.build_vocab:main", "-config", vocabulary)
    del config["n_sample"], config["num_threads"], config["save_data"]
    file.write_text(yaml.safe_dump(config | training))
    run("onmt.bin.train:main", "-config", file)


def train_sockeye(data: Path, folder: Path, steps: int) -> None:
    """Pre-norm; the target embedding is the projection."""
    prepared = data / "sockeye"
    corpus = {"source": data / "train.bpe.de", "target": data / "train.bpe.en"}
    run("sockeye.prepare_data:main", *options({**corpus, "output": prepared, "max-seq-len": 95}))
    run("sockeye.train:main", *options({
        "prepared-data": prepared, "validation-source": data / "val.bpe.de",
        "validation-target": data / "val.bpe.en", "output": folder, "overwrite-output": True,
        "use-cpu": True, "num-layers": f"{LAYERS}:{LAYERS}", "transformer-model-size": WIDTH,
        "transformer-attention-heads": HEADS, "transformer-feed-forward-num-hidden": D_FF,
        "transformer-preprocess": "n", "transformer-postprocess": "dr",
        "weight-tying-type": "trg_softmax", "label-smoothing": SMOOTHING, "batch-type": "max-word",
        "batch-size": TOKENS, "update-interval": 1, "initial-learning-rate": RATE,
        "learning-rate-warmup": WARMUP, "learning-rate-scheduler-type": "inv-sqrt-decay",
        "max-updates": steps, "checkpoint-interval": steps, "decode-and-evaluate": 0, "seed": 1,
        "max-seq-len": 95,
    }))  # fmt: skip
    shutil.copyfile(data / "codes", folder / "codes")


def train_fsmt(data: Path, folder: Path, steps: int) -> None:
    """fairseq's model, as transformers' conversion script writes it."""
    fairseq = folder.parent / "fairseq"
    train("fairseq", data, fairseq, steps)
    checkpoint = load_torch(fairseq / "checkpoint_last.pt", inert=("fairseq.*", "argparse.*"))
    sides = {}
    for side, language in (("src", SOURCE), ("tgt", TARGET)):
        words = ["<s>", "<pad>", "</s>", "<unk>"]
        words += [line.rpartition(" ")[0] for line in (fairseq / f"dict.{language}.txt").open()]
        names = [word if word.startswith("<") and i < 4 else
                 word.removesuffix("@@") if word.endswith("@@") else f"{word}</w>"
                 for i, word in enumerate(words)]  # fmt: skip
        sides[side] = {name: number for number, name in enumerate(names)}
        (folder / f"vocab-{side}.json").write_text(json.dumps(sides[side], ensure_ascii=False))
    merges = (data / "codes").read_text().splitlines()[1:]
    (folder / "merges.txt").write_text("".join(f"{line} 1\n" for line in merges))
    config = FSMTConfig(
        langs=list(LANGUAGES), src_vocab_size=len(sides["src"]), tgt_vocab_size=len(sides["tgt"]),
        d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=D_FF,
        decoder_ffn_dim=D_FF, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        dropout=DROPOUT, scale_embedding=True, tie_word_embeddings=True, activation_function="relu",
    )  # fmt: skip
    config.save_pretrained(folder)
    names = {"langs": list(LANGUAGES), "do_lower_case": False, "tokenizer_class": "FSMTTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    state = {f"model.{name}": tensor for name, tensor in checkpoint["model"].items()
             if not re.search(r"version|embed_positions|output_projection", name)}  # fmt: skip
    torch.save(state, folder / "pytorch_model.bin")


def train_hf_marian(data: Path, folder: Path, steps: int) -> None:
    """A `MarianMTModel`, with a SentencePiece model per side and one vocabulary."""
    import sentencepiece

    pieces: dict[str, int] = {"</s>": 0, "<unk>": 1}
    models = {}
    for side, language in (("source", SOURCE), ("target", TARGET)):
        sentencepiece.SentencePieceTrainer.train(
            input=str(data / f"train.{language}"), model_prefix=str(folder / side),
            vocab_size=PIECES, character_coverage=0.9995, minloglevel=2,
        )  # fmt: skip
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
        (folder / f"{side}.vocab").unlink()
        model = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{side}.spm"))
        models[language] = model
        for number in range(3, len(model)):
            pieces.setdefault(model.id_to_piece(number), len(pieces))
    pad = pieces.setdefault("<pad>", len(pieces))
    (folder / "vocab.json").write_text(json.dumps(pieces, ensure_ascii=False))
    names = {"source_lang": SOURCE, "target_lang": TARGET, "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    config = MarianConfig(
        vocab_size=len(pieces), d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=D_FF,
        decoder_ffn_dim=D_FF, activation_function="swish", dropout=DROPOUT, scale_embedding=True,
        max_position_embeddings=512, pad_token_id=pad, eos_token_id=0, decoder_start_token_id=pad,
        forced_eos_token_id=0, num_beams=4, bad_words_ids=[[pad]], max_length=128,
    )  # fmt: skip
    torch.manual_seed(1)
    model = MarianMTModel(config)

    def encode(line: str, language: str) -> list[int]:
        return [*(pieces.get(each, 1) for each in models[language].encode(line, out_type=str)), 0]

    def logits(sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return model(
            input_ids=sources, attention_mask=sources.ne(pad).long(), decoder_input_ids=targets
        ).logits

    _train(model, logits, _batches(data, encode), steps, start=pad, pad=pad)
    model.save_pretrained(folder)


def train_marian(data: Path, folder: Path, steps: int) -> None:
    """Post-norm, one matrix for all, and a SentencePiece model that Marian trains."""
    vocabulary = folder / "vocab.spm"
    run("_pymarian:main", "train", *options({
        "type": "transformer", "model": folder / "model.npz", "dim-emb": WIDTH,
        "transformer-dim-ffn": D_FF, "transformer-heads": HEADS, "enc-depth": LAYERS,
        "dec-depth": LAYERS, "tied-embeddings-all": True, "transformer-dropout": DROPOUT,
        "label-smoothing": SMOOTHING, "learn-rate": RATE, "lr-warmup": WARMUP,
        "lr-decay-inv-sqrt": WARMUP, "optimizer-params": (0.9, 0.98, 1e-9), "clip-norm": 0,
        "mini-batch": PAIRS, "max-length": 100, "after": f"{steps}u", "cpu-threads": 1,
        "workspace": 500, "seed": 1, "beam-size": 5, "normalize": 0.6, "quiet": True,
        "train-sets": (data / "train.de", data / "train.en"),
        "vocabs": (vocabulary, vocabulary), "dim-vocabs": (PIECES, PIECES),
    }))  # fmt: skip


def train_tensor2tensor(data: Path, folder: Path, steps: int) -> None:
    """Pre-norm, one matrix for all, and subwords that tensor2tensor learns."""
    script = Path(__file__).with_name("tensor2tensor_training.py")
    hparams = {
        "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "filter_size": D_FF, "num_heads": HEADS,
        "batch_size": TOKENS, "max_length": 100, "learning_rate_warmup_steps": WARMUP,
        "learning_rate_constant": RATE * (WARMUP * WIDTH) ** 0.5,
    }  # fmt: skip
    settings = {
        "data": str(data.resolve()), "folder": str(folder.resolve()), "languages": LANGUAGES,
        "vocabulary": PIECES, "steps": steps, "hparams": hparams,
    }  # fmt: skip
    execute([tensor2tensor.python(), str(script), json.dumps(settings)], script.name)


class TutorialModel(nn.Module):
    """The names of PyTorch's translation tutorial around `torch.nn.Transformer`."""

    def __init__(self, source: int, target: int):
        super().__init__()
        self.transformer = nn.Transformer(
            WIDTH, HEADS, LAYERS, LAYERS, D_FF, DROPOUT, batch_first=True
        )
        self.generator = nn.Linear(WIDTH, target)
        self.src_tok_emb, self.tgt_tok_emb = nn.Module(), nn.Module()
        self.src_tok_emb.embedding = nn.Embedding(source, WIDTH)
        self.tgt_tok_emb.embedding = nn.Embedding(target, WIDTH)
        for embedding in (self.src_tok_emb.embedding, self.tgt_tok_emb.embedding):
            nn.init.normal_(embedding.weight, std=WIDTH**-0.5)
        self.positional_encoding = nn.Module()
        angles = torch.arange(5000)[:, None] * 10000 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).view(5000, 1, WIDTH)
        self.positional_encoding.register_buffer("pos_embedding", table)

    def _embed(self, embedding: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        positions = self.positional_encoding.pos_embedding[: ids.shape[1], 0]
        return embedding.embedding(ids) * WIDTH**0.5 + positions

    def forward(self, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logits from ids, both (batch, length), whose padding is 1."""
        mask = torch.ones(targets.shape[1], targets.shape[1], dtype=torch.bool).triu(1)
        hidden = self.transformer(
            self._embed(self.src_tok_emb, sources), self._embed(self.tgt_tok_emb, targets),
            tgt_mask=mask, src_key_padding_mask=sources.eq(1), tgt_key_padding_mask=targets.eq(1),
            memory_key_padding_mask=sources.eq(1),
        )  # fmt: skip
        return self.generator(hidden)


def train_torch_nn(data: Path, folder: Path, steps: int) -> None:
    """`torch.nn.Transformer` in the tutorial's model: post-norm with a norm after each stack."""
    vocabularies = _vocabularies(data, folder, ["<unk>", "<pad>", "<bos>", "<eos>"])
    torch.manual_seed(1)
    model = TutorialModel(*map(len, vocabularies.values()))
    _train(model, model, _batches(data, _encoder(vocabularies), "train.bpe"), steps, start=2, pad=1)
    torch.save(model.state_dict(), folder / "model.pt")


def train_annotated_transformer(data: Path, folder: Path, steps: int) -> None:
    """The notebook's own model, loss, schedule and loop over batches."""
    code = torch_nn.annotated_transformer()
    vocabularies = _vocabularies(data, folder, ["<s>", "</s>", "<blank>", "<unk>"])
    start, pad = 0, 2
    torch.manual_seed(1)
    sizes = list(map(len, vocabularies.values()))
    model = code.make_model(*sizes, N=LAYERS, d_model=WIDTH, d_ff=D_FF, h=HEADS, dropout=DROPOUT)
    optimizer = torch.optim.Adam(model.parameters(), 1.0, betas=(0.9, 0.98), eps=1e-9)
    factor = RATE * (WIDTH * WARMUP) ** 0.5
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: code.rate(step, WIDTH, factor, WARMUP)
    )
    loss = code.SimpleLossCompute(model.generator, code.LabelSmoothing(sizes[1], pad, SMOOTHING))
    batches = itertools.cycle(_batches(data, _encoder(vocabularies), "train.bpe"))
    examples = (
        code.Batch(_padded(sources, pad), _padded([[start, *each] for each in targets], pad), pad)
        for sources, targets in itertools.islice(batches, steps)
    )
    with contextlib.redirect_stdout(None):
        code.run_epoch(examples, model.train(), loss, optimizer, scheduler)
    torch.save(model.state_dict(), folder / "model.pt")


def _vocabularies(data: Path, folder: Path, specials: list[str]) -> dict[str, dict[str, int]]:
    """Ids by token for each language. They are written to the folder as lists, with the codes."""
    found = {}
    for side, language in zip(("src", "tgt"), LANGUAGES, strict=True):
        tokens = {
            token for line in (data / f"train.bpe.{language}").open() for token in line.split()
        }
        words = [*specials, *sorted(tokens)]
        (folder / f"vocab.{side}.txt").write_text("\n".join(words) + "\n")
        found[language] = {word: number for number, word in enumerate(words)}
    shutil.copyfile(data / "codes", folder / "codes")
    return found


def _encoder(vocabularies: dict[str, dict[str, int]]) -> Callable[[str, str], list[int]]:
    """Turns a line of tokens in a language into ids. A source is surrounded by special tokens, and
    a target is followed by one."""

    def encode(line: str, language: str) -> list[int]:
        vocabulary = vocabularies[language]
        start, end = ("<bos>", "<eos>") if "<bos>" in vocabulary else ("<s>", "</s>")
        ids = [vocabulary.get(each, vocabulary["<unk>"]) for each in line.split()]
        return [*([vocabulary[start]] if language == SOURCE else []), *ids, vocabulary[end]]

    return encode


Batch = tuple[list[list[int]], list[list[int]]]


def _batches(
    data: Path, encode: Callable[[str, str], list[int]], stem: str = "train"
) -> list[Batch]:
    sides = [
        [encode(line.rstrip("\n"), language) for line in (data / f"{stem}.{language}").open()]
        for language in LANGUAGES
    ]
    pairs = sorted(zip(*sides, strict=True), key=lambda pair: len(pair[1]))
    starts = torch.randperm(len(pairs) // PAIRS, generator=torch.Generator().manual_seed(1)) * PAIRS
    return [tuple(zip(*pairs[start : start + PAIRS], strict=True)) for start in starts.tolist()]  # type: ignore[misc]


def _padded(rows: Sequence[list[int]], pad: int) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), True, pad)


def _train(
    model: nn.Module, logits: Callable[..., torch.Tensor], batches: list[Batch], steps: int,
    start: int, pad: int,
) -> None:  # fmt: skip
    """A training loop, for models that come without a training program."""
    optimizer = torch.optim.Adam(model.parameters(), RATE, betas=(0.9, 0.98))
    warm = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, (WARMUP / (step + 1)) ** 0.5)
    )
    criterion = nn.CrossEntropyLoss(ignore_index=pad, label_smoothing=SMOOTHING)
    model.train()
    for step in range(steps):
        sources, targets = (_padded(rows, pad) for rows in batches[step % len(batches)])
        inputs = torch.cat([torch.full_like(targets[:, :1], start), targets[:, :-1]], dim=1)
        optimizer.zero_grad()
        criterion(logits(sources, inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        warm.step()
    model.eval()


TRAININGS: dict[str, Callable[[Path, Path, int], None]] = {
    "annotated_transformer": train_annotated_transformer,
    "fairseq": train_fairseq,
    "fsmt": train_fsmt,
    "hf_marian": train_hf_marian,
    "joeynmt": train_joeynmt,
    "marian": train_marian,
    "opennmt_py": train_opennmt_py,
    "sockeye": train_sockeye,
    "tensor2tensor": train_tensor2tensor,
    "torch_nn": train_torch_nn,
}


def train(toolkit: str, data: Path, folder: Path, steps: int) -> None:
    """Train a model, unless the folder has one with the same number of updates."""
    done = folder / ".trained"
    if not done.is_file() or done.read_text() != str(steps):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        TRAININGS[toolkit](data, folder, steps)
        done.write_text(str(steps))
