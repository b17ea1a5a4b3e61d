"""Who is who as ops, what is built, sessions, objects, and names that are refused."""

from __future__ import annotations

import numpy as np
import pytest

import gradred.keras
import gradred.tensorflow as hvd
import tensorflow as tf
from gradred._native import core
from gradred.errors import InvalidArgument, Unsupported

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.smoke]

OPS = {
    "rank": hvd.rank_op,
    "size": hvd.size_op,
    "local_rank": hvd.local_rank_op,
    "local_size": hvd.local_size_op,
}


@pytest.mark.parametrize("what", OPS)
def test_ops(what, rank, size):
    expected = getattr(hvd, what)()
    for op in (OPS[what], tf.function(lambda: OPS[what]() + 0)):
        value = op()
        assert value.dtype == tf.int32 and value.shape == ()
        assert int(value) == expected
    with tf.Graph().as_default() as graph:
        value = OPS[what](name="asked")
        assert value.op.name == "asked"
        with tf.compat.v1.Session(graph=graph) as session:
            assert session.run(value) == expected


@pytest.mark.ranks(3)
def test_ops_of_process_sets(rank, size):
    pair = hvd.add_process_set([0, 2])
    number = pair.process_set_id
    assert int(hvd.size_op(number)) == 2
    assert int(hvd.process_set_included_op(number)) == (rank != 1)
    assert int(hvd.process_set_included_op()) == 1
    with pytest.raises(InvalidArgument, match="no process set 99"):
        hvd.size_op(99)


def test_ops_are_asked_when_they_run():
    """A function traced before the engine starts anew sees the new one."""
    step = tf.function(lambda: (hvd.rank_op(), hvd.size_op()))
    assert [int(v) for v in step()] == [hvd.rank(), hvd.size()]
    hvd.shutdown()
    with pytest.raises(tf.errors.FailedPreconditionError, match="NotInitialized"):
        step()
    hvd.init()
    assert [int(v) for v in step()] == [hvd.rank(), hvd.size()]


def test_what_is_built(size):
    assert hvd.mpi_built() is True
    assert hvd.mpi_enabled() is (core.mpi_library() is not None)
    assert hvd.mpi_threads_supported() is (hvd.mpi_enabled() and not core.mpi_one_at_a_time())
    for name in ("gloo_built", "gloo_enabled", "ddl_built", "ccl_built", "cuda_built"):
        assert getattr(hvd, name)() is False
    assert hvd.rocm_built() is False
    assert hvd.nccl_built() == 0
    assert hvd.is_homogeneous() is True
    # Arguments of Horovod's.
    assert not any(f(verbose=True) for f in (hvd.gloo_built, hvd.nccl_built, hvd.cuda_built))


def test_objects(rank, size):
    assert hvd.broadcast_object({"rank": rank}, 0, None, "named") == {"rank": 0}
    fetch = hvd.broadcast_object_fn(root_rank=size - 1)
    assert fetch([rank]) == [size - 1]
    assert hvd.allgather_object(rank) == list(range(size))


@pytest.mark.parametrize("resources", [True, False])
def test_global_variables_in_sessions(resources, rank, size):
    v1 = tf.compat.v1
    root = size - 1
    with tf.Graph().as_default():
        a = v1.get_variable("a", initializer=float(rank), use_resource=resources)
        b = v1.get_variable("b", initializer=[rank, rank], use_resource=resources)
        update = hvd.broadcast_global_variables(root)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(update)
            assert session.run(a) == root
            np.testing.assert_array_equal(session.run(b), [root, root])


def test_the_hook(rank, size):
    v1 = tf.compat.v1
    hook = hvd.BroadcastGlobalVariablesHook(size - 1, device="/cpu:0")
    for _ in range(2):  # a hook may serve several graphs
        with tf.Graph().as_default():
            v1.train.create_global_step()
            x = v1.get_variable("x", initializer=[float(rank)])
            with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
                np.testing.assert_array_equal(session.run(x), [size - 1])


def test_global_variables_in_eager_mode():
    with pytest.raises(Unsupported, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_names_that_are_refused():
    for module, names in (
        (hvd.elastic, ("TensorFlowState", "TensorFlowKerasState", "ObjectState", "State")),
        (
            gradred.keras.elastic,
            (
                *("KerasState", "CommitStateCallback"),
                *("UpdateBatchStateCallback", "UpdateEpochStateCallback"),
            ),
        ),
    ):
        for name in names:
            with pytest.raises(Unsupported, match=rf"elastic\.{name}: elastic training is not"):
                getattr(module, name)(model=None)
        with pytest.raises(Unsupported, match=r"elastic\.run"):
            module.run(lambda state: None)
    with pytest.raises(Unsupported, match="Adasum"):
        hvd.grouped_allreduce([tf.zeros([2])], op=hvd.Adasum)
