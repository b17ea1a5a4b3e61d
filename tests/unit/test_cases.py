"""The faults that users of this kind of software meet, and the tests that show the right behaviour.

Each is a situation, by its number in the list of cases; TESTS names what asserts the right value.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]

# Silent wrong results (S), hangs and crashes (H), speed and tools (P).
TESTS = {
    # fit with the distributed optimizer on Keras 3: each gradient is reduced once a step
    "S1": ["keras/test_equal.py::test_optimizers_in_fit", "keras/test_equal.py::test_modes_of_fit"],
    # a loop with a plain tape; tape and optimizer both distributed are an error
    "S2": [
        "keras/test_equal.py::test_custom_loops",
        "keras/test_equal.py::test_tape_and_optimizer_together_are_refused",
    ],
    # the first of a group has another shape on one rank
    "S3": [
        "mpi/test_disagreement.py::test_arrays",
        "tensorflow/test_tensor_disagreement.py::test_table",
        "tensorflow/test_collectives.py::test_ranks_with_other_shapes",
    ],
    # op=Sum and groups of an optimizer are honoured
    "S4": [
        "keras/test_equal.py::test_sum",
        "keras/test_equal.py::test_groups_of_variables",
        "keras/test_groups.py::test_lists_are_what_travels_together",
        "keras/test_groups.py::test_numbers_and_sizes_cut_as_they_say",
    ],
    # two variables of one name in a group
    "S5": ["tensorflow/test_tape.py::test_groups_of_variables_that_share_a_name"],
    # float16 Average of 40000
    "S6": ["tensorflow/test_collectives.py::test_averages_of_what_is_large_do_not_overflow"],
    # overflow of the wire is counted, and loss scaling sees it on all ranks
    "S7": [
        "tensorflow/test_collectives.py::test_overflow_of_the_wire_is_counted",
        "keras/test_precision.py::test_overflow_on_the_wire_skips_the_step_on_all_ranks",
    ],
    # int8 Average of 100 and 100
    "S8": ["tensorflow/test_collectives.py::test_averages_of_what_is_large_do_not_overflow"],
    # float64 with a prescale of 0.1
    "S9": ["tensorflow/test_collectives.py::test_scales_keep_double_precision"],
    # adjoints
    "S10": [
        "tensorflow/test_gradients.py::test_dot_products_agree",
        "tensorflow/test_gradients.py::test_gradients_of_extrema_and_products",
    ],
    # an optimizer that has stepped keeps its state
    "S11": ["keras/test_wrapping.py::test_an_optimizer_that_has_stepped"],
    # batch normalization over unequal batches
    "S12": [
        "keras/test_sync_batch_norm.py::test_as_one_process_with_the_joined_batch",
        "keras/test_sync_batch_norm.py::test_small_deviations_of_a_large_mean",
    ],
    # settings that differ between ranks
    "S13": ["mpi/test_lifecycle.py::test_settings_that_differ"],
    # the launcher says 4 ranks, MPI sees 1
    "S14": ["mpi/test_mpi4py.py::test_launcher_says_four_and_mpi_sees_one"],
    # a saved optimizer loads without gradred, and continues equal when wrapped again
    "S15": [
        "keras/test_files.py::test_a_file_loads_where_there_is_no_gradred",
        "keras/test_files.py::test_a_loaded_model_goes_on",
    ],
    # one name for an allreduce, later for a reducescatter
    "H1": [
        "mpi/test_disagreement.py::test_one_name_for_operations_in_turn",
        "tensorflow/test_tensor_disagreement.py::test_one_name_for_operations_in_turn",
    ],
    # shutdown, then init
    "H2": [
        "mpi/test_lifecycle.py::test_init_after_shutdown_several_times",
        "keras/test_positions.py::test_graphs_after_another_init",
    ],
    # settings with rubbish
    "H3": [
        "unit/test_config.py::test_rubbish_is_refused",
        "mpi/test_lifecycle.py::test_rubbish_settings_of_one_rank",
    ],
    # more groups than variables, none, groups without gradients
    "H4": [
        "unit/test_grouping.py::test_cuts_into_nearly_equal_groups",
        "keras/test_groups.py::test_forms",
        "keras/test_positions.py::test_a_group_without_gradients",
    ],
    # float16 and float32 in a group
    "H5": ["keras/test_positions.py::test_half_and_single_gradients_in_one_group"],
    # dense tensors and IndexedSlices in a group
    "H6": ["tensorflow/test_tape.py::test_slices", "keras/test_equal.py::test_embeddings"],
    # gradient accumulation with a gradient that is None
    "H7": [
        "keras/test_positions.py::test_accumulation_with_a_gradient_that_is_none",
        "keras/test_passes.py::test_exact_sums",
        "keras/test_passes.py::test_a_gradient_that_comes_in_some_passes_on_some_ranks",
    ],
    # loss scaling inside, outside, and by the policy
    "H8": [
        "keras/test_loss_scale.py::test_all_ranks_skip_the_same_steps",
        "keras/test_precision.py::test_loss_scale_in_a_loop_of_ones_own",
    ],
    # wrapped twice
    "H9": [
        "keras/test_wrapping.py::test_wrapping_twice_is_refused",
        "tensorflow/test_v1.py::test_wrapping_twice_is_refused",
        "tensorflow/test_tape.py::test_not_a_tape",
    ],
    # a schedule that is not registered for serialization
    "H10": ["keras/test_wrapping.py::test_a_schedule_that_cannot_be_serialized"],
    # warm-up and schedule with momentum
    "H11": [
        "keras/test_schedules.py::test_warm_up",
        "keras/test_schedules.py::test_schedules_one_after_the_other",
    ],
    # a step more than the others
    "H12": [
        "tensorflow/test_collectives.py::test_join",
        "mpi/test_late.py::test_one_step_more_fails_within_the_limit",
        "mpi/test_late.py::test_one_step_more_than_a_rank_that_has_ended",
        "keras/test_jobs.py::test_one_step_more_than_others_make",
    ],
    # a rank raises, exits or is killed
    "H13": [
        "multiproc/test_failures.py::test_raise",
        "multiproc/test_failures.py::test_exit",
        "multiproc/test_failures.py::test_kill",
        "mpi/test_failures.py::test_plain_mpirun",
        "keras/test_jobs.py::test_a_rank_that_is_killed_in_fit",
    ],
    # images whose sizes differ between ranks and steps
    "H14": [
        "keras/test_positions.py::test_images_of_other_sizes",
        "tensorflow/test_collectives.py::test_unknown_dimensions",
    ],
    # mpi4py first, later; MPI of others
    "H15": [
        "mpi/test_mpi4py.py::test_first",
        "mpi/test_mpi4py.py::test_later",
        "mpi/test_mpi4py.py::test_our_mpi_stays_ours",
    ],
    # stall limits fire in time
    "H16": [
        "multiproc/test_failures.py::test_stall_limits",
        "mpi/test_late.py::test_stall_limits_over_mpi",
    ],
    # more than 2^31 - 1 elements
    "H17": ["mpi/test_huge.py::test_allreduce"],
    # variables in other orders or with other names
    "H18": [
        "keras/test_positions.py::test_other_names_on_some_ranks",
        "tensorflow/test_tape.py::test_ranks_with_other_variables",
    ],
    # an op fails on one rank in the backward pass
    "H19": [
        "tensorflow/test_tape.py::test_an_op_that_fails_on_one_rank_in_a_graph",
        "tensorflow/test_tape.py::test_an_op_that_fails_on_one_rank_in_eager_mode",
        "keras/test_wrapping.py::test_a_step_of_fit_that_fails_on_one_rank",
    ],
    # a rank that writes a checkpoint for long
    "H20": ["mpi/test_late.py::test_a_rank_that_writes_a_checkpoint"],
    # a gradient that is None on some ranks or in some steps
    "H21": [
        "tensorflow/test_tape.py::test_a_gradient_that_some_ranks_lack",
        "tensorflow/test_tape.py::test_a_gradient_that_comes_and_goes",
        "keras/test_wrapping.py::test_a_gradient_that_one_rank_lacks",
    ],
    # no communication, no CPU
    "P2": [
        "mpi/test_resources.py::test_silence_costs_nothing_and_small_tensors_little",
        "mpi/test_lifecycle.py::test_idle_uses_no_cpu",
    ],
    # memory in proportion to use
    "P3": ["mpi/test_resources.py::test_silence_costs_nothing_and_small_tensors_little"],
    # the same bits
    "P4": [
        "keras/test_same_bits.py::test_shuffled_groups",
        "keras/test_same_bits.py::test_arrays_of_a_wide_range",
    ],
    # the same index repeated in IndexedSlices
    "P5": [
        "tensorflow/test_sparse.py::test_rows_are_summed",
        "tensorflow/test_sparse.py::test_what_moves_less_is_chosen_alike",
    ],
    # thousands of tensors
    "P6": [
        "mpi/test_many_tensors.py::test_in_one_call",
        "mpi/test_many_tensors.py::test_under_names_of_their_own",
    ],
    # killed while a timeline is written
    "P7": ["mpi/test_timeline.py::test_a_killed_rank_leaves_a_readable_file"],
    # launch lines
    "P8": [
        "launch/test_run.py::test_stand_ins",
        "launch/test_mpirun_lines.py::test_hydra",
        "launch/test_job_launchers.py::test_srun",
        "launch/test_job_launchers.py::test_jsrun_by_resource_sets",
        "launch/test_job_launchers.py::test_jsrun_by_ranks",
    ],
    # the build report
    "P9": [
        "launch/test_info_doctor.py::test_reasons",
        "launch/test_info_doctor.py::test_each_line_loads_the_thing",
        "launch/test_info_doctor.py::test_launchers",
    ],
}
# P1 is a time: benchmarks/allreduce.py measures it, and no test asserts it.
NUMBERS = {"S": range(1, 16), "H": range(1, 22), "P": range(2, 10)}


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((_TESTS / file).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_no_case_is_missing() -> None:
    assert set(TESTS) == {f"{kind}{n}" for kind, numbers in NUMBERS.items() for n in numbers}


@pytest.mark.parametrize("case", list(TESTS))
def test_shown(case: str) -> None:
    assert TESTS[case], "no test shows it"
    for test in TESTS[case]:
        match = re.fullmatch(r"([\w/]+\.py)::(test_\w+)", test)
        assert match, test
        file, function = match.groups()
        assert function in functions_of(file), f"there is no {test}"
