"""allreduce, allgather, broadcast and barrier on tensors, eager and in graphs."""

from __future__ import annotations

import time

import numpy as np
import pytest

import gradred
import gradred.tensorflow as hvd
import tensorflow as tf
from gradred._native import core
from gradred.errors import Abandoned, InvalidArgument, Mismatch, Unsupported
from gradred.tensorflow import ops
from gradred.tensorflow.native import as_gradred_error

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.smoke]

DTYPES = [
    *(tf.uint8, tf.uint16, tf.uint32, tf.uint64, tf.int8, tf.int16, tf.int32, tf.int64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64),
]


def modes(function):
    """The function as it is, and as a tf.function that is run twice."""

    def in_graph(*args):
        traced = tf.function(function)
        traced(*args)
        return traced(*args)

    return {"eager": function, "graph": in_graph}


BOTH = pytest.mark.parametrize("mode", ["eager", "graph"])


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_reductions_of_every_dtype(mode, dtype, rank, size):
    mine = tf.cast(tf.constant([1, 2, 3]) + rank, dtype)
    everyone = np.array([[1, 2, 3]]) + np.arange(size)[:, None]
    for op, expected in (
        (hvd.Sum, everyone.sum(0)),
        (hvd.Min, everyone.min(0)),
        (hvd.Max, everyone.max(0)),
        (hvd.Product, everyone.prod(0)),
    ):
        result = modes(lambda x, op=op: hvd.allreduce(x + x - x, op=op))[mode](mine)
        assert result.dtype == dtype
        np.testing.assert_array_equal(tf.cast(result, tf.float64), expected)


@BOTH
@pytest.mark.parametrize("count", [1, 16383, 16384, 300_000])  # from 64 KiB on in kept pages
def test_tensors_that_are_read_elsewhere_too(mode, count, rank, size):
    variable = tf.Variable(tf.fill([count], 1.0 + rank))
    total = size * (size + 1) / 2

    def run(x):
        product = x * variable
        reduced = [hvd.allreduce(t, op=hvd.Sum) for t in (x, x, variable, product)]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * x)
        gradient = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, variable)
        return x, product, *reduced, gradient

    for _ in range(2):
        x, product, *reduced, gradient = modes(run)[mode](tf.fill([count], 1.0 + rank))
        assert (x.numpy() == 1 + rank).all()
        assert (product.numpy() == (1 + rank) ** 2).all()
        for result in (*reduced[:3], gradient):
            assert (result.numpy() == total).all()
        assert (reduced[3].numpy() == sum((1 + r) ** 2 for r in range(size))).all()
    assert (variable.numpy() == 1 + rank).all()


@BOTH
def test_bool_is_or_and_and(mode, rank, size):
    x = tf.constant([rank == 0, True, False])
    run = modes(lambda x: (hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x, op=hvd.Min)))[mode]
    either, both = run(x)
    np.testing.assert_array_equal(either, [True, True, False])
    np.testing.assert_array_equal(both, [size == 1, True, False])


@BOTH
def test_average_is_the_default(mode, rank, size):
    x = tf.constant([1.0, 2.0]) * (rank + 1)
    result = modes(hvd.allreduce)[mode](x)
    np.testing.assert_array_equal(result, np.float32([1, 2]) * np.float32((size + 1) / 2))


EXTREMES = {
    **{tf.int8: [127, -128], tf.int16: [2**15 - 1, -(2**15)], tf.int32: [2**31 - 1, -(2**31)]},
    **{tf.int64: [2**63 - 1, -(2**63)], tf.uint8: [200, 255], tf.uint16: [2**16 - 1, 40000]},
    **{tf.uint32: [2**32 - 1, 2**31], tf.uint64: [2**64 - 1, 2**63]},
    **{tf.float16: [40000, -60000], tf.bfloat16: [2.0**126, -(2.0**126)]},
}


@BOTH
def test_averages_of_what_is_large_do_not_overflow(mode, rank, size):
    """S6, S8: in all reductions, alone and in a group."""
    for dtype, values in EXTREMES.items():
        x = tf.constant(np.array(values * size, dtype.as_numpy_dtype))
        mine = np.array_split(x.numpy(), size)[rank]

        def average(x):
            alone, scattered = hvd.allreduce(x), hvd.reducescatter(x)
            return alone, scattered, *hvd.grouped_allreduce([x]), *hvd.grouped_reducescatter([x])

        whole, part, grouped, grouped_part = modes(average)[mode](x)
        for result, expected in ((whole, x.numpy()), (part, mine)):
            assert result.dtype == dtype
            assert result.numpy().tolist() == expected.tolist()
        assert grouped.numpy().tolist() == whole.numpy().tolist()
        assert grouped_part.numpy().tolist() == part.numpy().tolist()


@BOTH
def test_scales_keep_double_precision(mode, rank, size):
    """S9: before and after the sum, in all reductions."""

    def scaled(x, **factors):
        rows = tf.repeat(x, size)
        return (
            hvd.allreduce(x, op=hvd.Sum, **factors),
            *hvd.grouped_allreduce([x], op=hvd.Sum, **factors),
            hvd.reducescatter(rows, op=hvd.Sum, **factors),
            *hvd.grouped_reducescatter([rows], op=hvd.Sum, **factors),
        )

    x = tf.constant([1.0 + rank], tf.float64)
    for factors in ({"prescale_factor": 0.1}, {"postscale_factor": 0.1}):
        expected = 0.1 * size * (size + 1) / 2
        for result in modes(lambda x, f=factors: scaled(x, **f))[mode](x):
            np.testing.assert_allclose(result, [expected], rtol=1e-15)


@BOTH
def test_overflow_of_the_wire_is_counted(mode, size):
    """S7"""
    before = gradred.metrics().saturated
    run = modes(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16))[mode]
    result = run(tf.constant([1e5, 1.0]))
    assert result.dtype == tf.float32
    np.testing.assert_array_equal(result, [np.inf, size])
    assert gradred.metrics().saturated > before


@BOTH
def test_bfloat16_on_the_wire(mode, size):
    run = modes(lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16))[mode]
    assert float(run(tf.constant(1.0 + 2**-12))) == 1.0


@BOTH
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7), (2, 3, 4, 5)], ids=str)
def test_shapes(mode, shape, rank, size):
    x = tf.cast(tf.reshape(tf.range(int(np.prod(shape))), shape), tf.float32) + rank
    result = modes(lambda x: hvd.allreduce(x, op=hvd.Sum))[mode](x)
    assert result.shape == shape
    expected = sum(x.numpy() - rank + r for r in range(size))
    np.testing.assert_array_equal(result, expected)


@BOTH
def test_a_group_of_mixed_dtypes(mode, rank, size):
    """H5"""
    xs = [
        tf.constant([1.0, 2.0], tf.float16) * (rank + 1),
        tf.constant([[3.0]], tf.float32) * (rank + 1),
        tf.constant(4, tf.int64) * (rank + 1),
        tf.zeros([0]),
    ]
    results = modes(lambda *xs: hvd.grouped_allreduce(xs, op=hvd.Sum))[mode](*xs)
    total = size * (size + 1) // 2
    for x, result in zip(xs, results, strict=True):
        assert (result.dtype, result.shape) == (x.dtype, x.shape)
        expected = x.numpy().astype(np.float64) / (rank + 1) * total
        np.testing.assert_array_equal(tf.cast(result, tf.float64), expected)


def test_inputs_are_left_alone(size):
    x, v = tf.constant([1.0, 2.0]), tf.Variable([3.0])

    @tf.function
    def step(x):
        temporary = x * 2.0
        return hvd.allreduce(temporary, op=hvd.Sum), hvd.allreduce(v, op=hvd.Sum), temporary

    for _ in range(2):
        total, of_variable, temporary = step(x)
    np.testing.assert_array_equal(x, [1, 2])
    np.testing.assert_array_equal(v, [3])
    np.testing.assert_array_equal(temporary, [2, 4])
    np.testing.assert_array_equal(total, [2 * size, 4 * size])
    np.testing.assert_array_equal(of_variable, [3 * size])
    np.testing.assert_array_equal(hvd.allreduce(x, op=hvd.Sum), [size, 2 * size])
    np.testing.assert_array_equal(x, [1, 2])


def test_unknown_dimensions(size):
    """H14: a dimension that differs between steps."""

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        return hvd.allreduce(x, op=hvd.Sum)

    for n in (1, 3, 0, 3, 5):
        result = step(tf.ones([n, 2]))
        np.testing.assert_array_equal(result, np.full((n, 2), size))
        np.testing.assert_array_equal(hvd.allreduce(tf.ones([n]), op=hvd.Sum), np.full(n, size))
    assert step.get_concrete_function().output_shapes == (None, 2)


def test_retraced_with_other_shapes(size):
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))
    for _ in range(2):
        for n in (1, 2, 3):
            np.testing.assert_array_equal(step(tf.ones([n])), np.full(n, size))


def test_constant_unused_and_repeated_tensors_are_reduced(size):
    """Nothing is folded, merged or dropped by the graph optimizer: the ranks would not meet."""

    @tf.function
    def step(x):
        hvd.allreduce(tf.constant([9.0]))
        return hvd.allreduce(tf.constant([1.0]), op=hvd.Sum), *(
            hvd.allreduce(x, op=hvd.Sum) for _ in range(2)
        )

    before = gradred.metrics().entries
    for _ in range(3):
        for result in step(tf.constant([1.0])):
            np.testing.assert_array_equal(result, [size])
    deadline = time.monotonic() + 20  # no op waits for the result that nobody uses
    while gradred.metrics().entries - before < 3 * 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gradred.metrics().entries - before == 3 * 4


def test_loops_reduce_in_each_iteration(rank, size):
    @tf.function
    def loop(x):
        total = tf.zeros_like(x)
        for i in tf.range(40):
            k = tf.cast(i, tf.float32)
            total += sum(hvd.grouped_allreduce([x + k, x * k], op=hvd.Sum))
        return total

    x = np.float32([1, 2]) + rank
    everyone = np.float32([[1, 2]]) + np.arange(size, dtype=np.float32)[:, None]
    expected = sum(((everyone + k) + everyone * k).sum(0) for k in range(40))
    for _ in range(3):
        np.testing.assert_array_equal(loop(x), expected)


def test_independent_iterations_may_overlap(rank, size):
    @tf.function
    def loop(x):
        results = tf.TensorArray(tf.float32, 12)
        body = lambda i, r: (i + 1, r.write(i, hvd.allreduce(x + tf.cast(i, tf.float32))))  # noqa: E731
        _, results = tf.while_loop(lambda i, _: i < 12, body, (0, results), parallel_iterations=8)
        return results.stack()

    mean = (size - 1) / 2
    for _ in range(5):
        result = loop(tf.constant(float(rank)))
        np.testing.assert_allclose(result, mean + np.arange(12), rtol=1e-6)


def test_conditions(rank, size):
    step = tf.function(
        lambda x: tf.cond(x > 0, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: x * 0.0)
    )
    assert float(step(tf.constant(2.0))) == 2.0 * size
    assert float(step(tf.constant(-2.0))) == 0.0


@pytest.mark.parametrize("v2_loops", [True, False])
def test_sessions(v2_loops, rank, size):
    v1 = tf.compat.v1
    for _ in range(rank):  # the numbers in the names of loops differ between ranks
        tf.function(lambda: tf.while_loop(lambda i: i < 3, lambda i: (i + 1,), (0,)))()
    graph = tf.Graph()
    with graph.as_default():
        if not v2_loops:
            v1.disable_control_flow_v2()
        try:
            x = v1.placeholder(tf.float32, [2])
            body = lambda i, s: (i + 1, s + hvd.allreduce(x + s, op=hvd.Sum))  # noqa: E731
            _, looped = v1.while_loop(lambda i, s: i < 3, body, (0, tf.zeros([2])))
        finally:
            v1.enable_control_flow_v2()
        once = hvd.allreduce(x, op=hvd.Sum)
        gathered = hvd.allgather(x)
        with v1.Session(graph=graph) as session:
            for _ in range(3):
                a, b, c = session.run([once, looped, gathered], {x: [1.0 + rank, 2.0]})
    total = np.float32([size * (size + 1) / 2, 2 * size])
    np.testing.assert_array_equal(a, total)
    expected = np.zeros(2, np.float32)
    for _ in range(3):
        expected = expected + total + size * expected
    np.testing.assert_array_equal(b, expected)
    np.testing.assert_array_equal(c, np.ravel([[1.0 + r, 2.0] for r in range(size)]))


@BOTH
def test_allgather_of_unequal_parts(mode, rank, size):
    run = modes(hvd.allgather)[mode]
    for rows in (rank, rank + 1, 2 * (size - rank)):
        gathered = run(tf.fill([rows, 2], float(rank)))
        counts = {rank: rows}
        each = hvd.allgather(tf.constant([rows])).numpy()
        assert each[rank] == counts[rank]
        expected = np.repeat(np.arange(size), each)[:, None] * np.ones((1, 2))
        np.testing.assert_array_equal(gathered, expected)


@BOTH
def test_gathers_and_broadcasts_of_every_dtype(mode, rank, size):
    def step(x):
        return hvd.allgather(x), *hvd.grouped_allgather([x, x[:0]]), hvd.broadcast(x[:1], size - 1)

    rows = [np.array([[r, 1]] * (r + 1)) for r in range(size)]
    for dtype in (tf.bool, *DTYPES, tf.complex64):
        results = modes(step)[mode](tf.cast(tf.constant(rows[rank]), dtype))
        expected = (np.concatenate(rows), np.concatenate(rows), np.zeros((0, 2)), rows[-1][:1])
        for result, value in zip(results, expected, strict=True):
            assert result.dtype == dtype and result.shape == value.shape
            assert bool(tf.reduce_all(result == tf.cast(tf.constant(value), dtype)))


@BOTH
def test_broadcast(mode, rank, size):
    for root in range(size):
        result = modes(lambda x, root=root: hvd.broadcast(x, root))[mode](tf.fill([3], rank))
        np.testing.assert_array_equal(result, [root] * 3)
        empty = modes(lambda x, root=root: hvd.broadcast(x, root))[mode](tf.zeros([0, 2]))
        assert empty.shape == (0, 2)


@pytest.mark.parametrize("inside", [False, True])
def test_broadcast_variables(inside, rank, size):
    root = size - 1
    dtypes = [tf.float32, tf.bool, tf.int64, tf.uint32, tf.complex64, tf.bfloat16, tf.float64]
    variables = [tf.Variable(tf.cast([rank, rank + 1], d), name="same") for d in dtypes]
    run = lambda: hvd.broadcast_variables(variables, root_rank=root)  # noqa: E731
    tf.function(run)() if inside else run()
    for v in variables:
        np.testing.assert_array_equal(v.numpy(), tf.cast([root, root + 1], v.dtype).numpy())
    assert hvd.broadcast_variables([], root_rank=0) is None


@BOTH
def test_barrier(mode, size):
    def step():
        hvd.barrier()
        return tf.constant(1)

    assert int(modes(step)[mode]()) == 1


@BOTH
def test_join(mode, rank, size):
    """Each rank has a step more than the one before; joined ranks bring zeros."""
    step = lambda x: hvd.allreduce(x, op=hvd.Sum, name=f"joined {mode}")  # noqa: E731
    join = hvd.join
    if mode == "graph":
        step, join = tf.function(step, autograph=False), tf.function(join)
    for _ in range(2):
        for k in range(rank + 1):
            assert float(step(tf.constant(1.0))) == size - k
        assert int(join()) == size - 1


@BOTH
def test_slices(mode, rank, size):
    def step(values, op):
        slices = tf.IndexedSlices(values, tf.constant([rank, 5]), tf.constant([8, 2]))
        return tf.convert_to_tensor(hvd.allreduce(slices, op=op, postscale_factor=2.0))

    values = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    for op, factor in ((hvd.Sum, 2.0), (hvd.Average, 2.0 / size)):
        result = modes(lambda v, op=op: step(v, op))[mode](values)
        expected = np.zeros((8, 2))
        for r in range(size):
            expected[r] += [1, 2]
            expected[5] += [3, 4]
        np.testing.assert_allclose(result, expected * factor, rtol=1e-6)
    double = tf.constant([[0.3, 1.0], [1.0, 1.0]], tf.float64)
    result = modes(lambda v: step(v, hvd.Average))[mode](double)
    assert result[rank, 0] == 0.3 * (2.0 / size)
    with pytest.raises(Unsupported, match="IndexedSlices"):
        step(values, hvd.Max)


@pytest.fixture
def pair():
    process_set = hvd.add_process_set(hvd.ProcessSet([0, 2]))
    yield process_set
    hvd.remove_process_set(process_set)


@BOTH
@pytest.mark.ranks(3)
def test_process_sets(mode, rank, pair):
    if rank == 1:
        with pytest.raises(InvalidArgument, match="rank 1 is no member"):
            hvd.allreduce(tf.constant(1.0), process_set=pair)
        return
    run = modes(lambda x: hvd.allreduce(x, process_set=pair))[mode]
    assert float(run(tf.constant(float(rank)))) == 1.0
    run = modes(lambda x: hvd.allgather(x, process_set=pair))[mode]
    np.testing.assert_array_equal(run(tf.constant([rank])), [0, 2])
    run = modes(lambda x: hvd.broadcast(x, 2, process_set=pair))[mode]
    assert float(run(tf.constant(float(rank)))) == 2.0
    with pytest.raises(InvalidArgument, match="root_rank=1"):
        hvd.broadcast(tf.constant(0.0), 1, process_set=pair)
    with tf.GradientTape() as tape:
        x = tf.constant([1.0] * (rank + 1))
        tape.watch(x)
        y = hvd.allgather(x, process_set=pair)
    gradient = tape.gradient(y, x, output_gradients=tf.range(4.0))
    np.testing.assert_array_equal(gradient, [0.0] if rank == 0 else [2.0, 4.0, 6.0])


# ---- errors


@BOTH
@pytest.mark.ranks(2, 3)
def test_ranks_with_other_shapes(job, mode, rank, size):
    """S3"""
    xs = [tf.zeros([3 if rank == 1 else 2]), tf.zeros([4]), tf.zeros([5])]
    run = modes(lambda *xs: hvd.grouped_allreduce(xs, name="differ"))[mode]
    with pytest.raises((Mismatch, tf.errors.FailedPreconditionError)) as caught:
        run(*xs)
    text = str(as_gradred_error(caught.value) if mode == "graph" else caught.value)
    assert "'differ/0'" in text and "rank 1: " in text and "[2]" in text and "[3]" in text
    assert len(set(job.exchange(text))) == 1
    # All is well again afterwards.
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == size


@BOTH
@pytest.mark.ranks(2, 3)
def test_ranks_with_other_dtypes(mode, rank):
    x = tf.zeros([2], tf.float64 if rank == 0 else tf.float32)
    run = modes(lambda x: hvd.allreduce(x, name="typed"))[mode]
    with pytest.raises((Mismatch, tf.errors.FailedPreconditionError), match="float64"):
        run(x)


def test_bad_arguments(size):
    x = tf.zeros([2])
    with pytest.raises(InvalidArgument, match="root_rank"):
        hvd.broadcast(x, size)
    with pytest.raises(InvalidArgument, match="dimension"):
        hvd.allgather(tf.constant(1.0))
    with pytest.raises(InvalidArgument, match="op=17"):
        hvd.allreduce(x, op=17)
    with pytest.raises(Unsupported, match="Adasum"):
        hvd.allreduce(x, op=hvd.Adasum)
    with pytest.raises(InvalidArgument, match="compression"):
        hvd.allreduce(x, compression="zip")
    with pytest.raises(InvalidArgument, match="average"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
    with pytest.raises(InvalidArgument, match="no tensor"):
        hvd.allreduce(object())
    with pytest.raises(InvalidArgument, match="bool"):
        hvd.allreduce(tf.constant([True]))
    assert float(hvd.allreduce(tf.constant(1.0), average=False)) == size


def test_jit_compile_is_refused_when_traced():
    for autograph in (False, True):  # which replaces exceptions that are not TensorFlow's
        step = tf.function(lambda x: hvd.allreduce(x), jit_compile=True, autograph=autograph)
        expected = Exception if autograph else Unsupported
        with pytest.raises(expected, match="inside jit_compile=True"):
            step(tf.zeros([2]))


def test_errors_in_eager_mode_are_gradreds():
    assert issubclass(Abandoned, gradred.Error)
    ours = as_gradred_error(
        tf.errors.AbortedError(None, None, "x gradred Abandoned: rank 1 gave up")
    )
    assert type(ours) is Abandoned and str(ours) == "rank 1 gave up"
    assert as_gradred_error(tf.errors.AbortedError(None, None, "something else")) is None


@pytest.mark.ranks(1)
def test_names_of_eager_calls_are_not_kept_for_ever() -> None:
    keys = set()  # TensorFlow keeps a kernel for each
    for i in range(1200):
        hvd.allreduce(tf.ones(1), name=f"passing.{i}")
        keys.add(next(reversed(ops._eager.values())).key)
    assert len(keys) <= 1025
    passing = [name for name in core.registered() if name.startswith("passing")]
    assert len(passing) <= 1024
    assert "passing.1199" in passing
    member = ops.Member("x", "allreduce", "float32", "float32", (1,))
    tf.config.experimental.set_synchronous_execution(False)  # one in the queue may have its key yet
    try:
        keys |= {ops.declare(f"queued.{i}", [member], [], 0).key for i in range(100)}
    finally:
        tf.config.experimental.set_synchronous_execution(True)
    assert len(keys) >= 1100
    assert hvd.allreduce(tf.ones(1), name="passing.0").numpy() == [1]
