r"""Translate a file or standard input, line by line, to a file or standard output.

    vanilla-transformer translate --model outputs/phrases --source in.txt --output out.txt
    echo "The train leaves at 3:30 PM." | vanilla-transformer translate --model outputs/phrases
    torchrun --nproc_per_node 8 -m vanilla_transformer translate --model outputs/phrases \
        --source in.txt --output out.txt
    vanilla-transformer translate --model outputs/phrases --ray --ray_address auto \
        --source s3://bucket/in.parquet --source_column en --output s3://bucket/out.parquet

Lines keep their order, and blank lines stay blank. Without files, each line is translated as soon
as it arrives.

From file to file, any number of processes share the work, or of machines with --ray. After an
interruption, run the same command again to resume. It does not resume with different weights or
options, but the model may be in another folder.

With --n_best, each line becomes several, the best first: "number ||| translation ||| score". Line
numbers start at 0. The score is the translation's log-probability divided by the length penalty.
--token_scores and --alignments add a field each. See docs/decoding.md.
"""

import sys
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

from ..data.text_files import open_output, open_text, read_arrived
from ..inference.loading import LoadingArguments
from ..inference.parallel_translation import transform_file
from ..inference.ray_workers import RayWorkerArguments
from .generation_options import HELP, add_generation_options, generation_option_names
from .parser import GroupedParser
from .processes import join_processes, sum_over_processes
from .ray_translation import expect_ray_options, translate_with_ray
from .translation_job import TranslateArguments, TranslationJob, report_limit

GROUPS = {
    "help": ["help", "help_all"],
    "files and models": [
        "model", "source", "output", "source_column", "target_column", "batch_size", "max_tokens",
        *(option.name for option in fields(LoadingArguments)), "compile",
    ],
    "search (all options of generate() work, see --help_all)": [
        *HELP, "seed", "target_prefix_file", "custom_generate", "force_words",
    ],
    "what to write": [
        "n_best", "token_scores", "alignments", "alignment_layer", "replace_unknown",
    ],
    "reranking": ["mbr", "candidates", "reverse_model", "reverse_weight", "length_weight"],
    "several machines": [option.name for option in fields(RayWorkerArguments)],
}  # fmt: skip


def make_parser() -> GroupedParser:
    """The parser. It returns `TranslateArguments`, `LoadingArguments`, `RayWorkerArguments` and, if
    any are given, a namespace with options of `generate()`."""
    more = [name for name in generation_option_names() if name not in HELP]
    parser = GroupedParser(
        (TranslateArguments, LoadingArguments, RayWorkerArguments),
        description=__doc__,
        usage="%(prog)s --model FOLDER [options]",
        groups=GROUPS,
        more_groups={"more options of generate()": more},
    )
    add_generation_options(parser)
    return parser


def main() -> None:
    arguments, loading, workers, *given = make_parser().parse_args_into_dataclasses()
    options = vars(given[0]) if given else {}
    state = join_processes(use_cpu=loading.device == "cpu")
    if workers.ray:
        expect_ray_options(arguments, loading, workers, state.num_processes)
        translate_with_ray(arguments, loading, options, workers)
        return
    job = TranslationJob(arguments, loading, options)
    job.check()  # raises errors before it touches the output
    if arguments.source is not None and arguments.output is not None:
        transform_file(
            job.translate,
            arguments.source,
            arguments.output,
            settings=job.settings(),
            source_column=arguments.source_column,
            target_column=arguments.target_column,
            process_index=state.process_index,
            num_processes=state.num_processes,
            wait_for_everyone=state.wait_for_everyone,
            show_progress=state.is_main_process and sys.stderr.isatty(),
        )
        counts = sum_over_processes(job.counts, state)
        if state.is_main_process:
            report_limit(*counts)
        state.destroy_process_group()
        return
    if state.num_processes > 1:
        raise ValueError(f"{state.num_processes} processes: expected both --source and --output")
    translate_stream(job)
    report_limit(*job.counts)


def translate_stream(job: TranslationJob) -> None:
    """Translate lines as they arrive, with a prompt if they come from a terminal."""
    arguments = job.arguments
    interactive = arguments.source is None and sys.stdin.isatty()
    prompt = "> " if interactive else ""
    if interactive:
        print("One line at a time; Ctrl-D ends.", file=sys.stderr)
    print(prompt, end="", file=sys.stderr, flush=True)
    with ExitStack() as files:
        source: Any = sys.stdin.buffer
        if arguments.source is not None:
            source = files.enter_context(open_text(arguments.source))
        target = files.enter_context(open_output(arguments.output))
        first = 0
        for lines in read_arrived(source, arguments.source or "standard input"):
            for line in job.translate(lines, first):
                print(line, file=target, flush=True)
            first += len(lines)
            print(prompt, end="", file=sys.stderr, flush=True)
