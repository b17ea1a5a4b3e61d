"""A training loop of one's own: a network learns a function of two numbers."""

import hashlib

import numpy as np

import gradred.tensorflow as hvd
import tensorflow as tf

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin the GPU to be used to process the local rank (one GPU per process).
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

generator = np.random.default_rng(hvd.rank())
points = generator.uniform(-2, 2, (1024, 2)).astype(np.float32)
values = np.sin(points[:, :1]) * points[:, 1:]
dataset = tf.data.Dataset.from_tensor_slices((points, values))
dataset = dataset.repeat().shuffle(1024).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.Input((2,)),
        tf.keras.layers.Dense(32, activation="tanh"),
        tf.keras.layers.Dense(32, activation="tanh"),
        tf.keras.layers.Dense(1),
    ]
)
loss = tf.keras.losses.MeanSquaredError()

# Horovod: adjust the learning rate based on the number of processes.
opt = tf.keras.optimizers.Adam(0.005 * hvd.size())


@tf.function
def training_step(points, values, first_batch):
    with tf.GradientTape() as tape:
        loss_value = loss(values, model(points, training=True))

    # Horovod: add Horovod DistributedGradientTape.
    tape = hvd.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    # Horovod: broadcast initial variable states from rank 0 to all other processes. After the
    # first gradient step, so that the optimizer has its variables.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        state = opt.variables() if callable(opt.variables) else opt.variables
        hvd.broadcast_variables(state, root_rank=0)

    return loss_value


# Horovod: adjust the number of steps based on the number of processes.
losses = []
for batch, (x, y) in enumerate(dataset.take(300 // hvd.size())):
    # Horovod: the loss of all ranks, for the record.
    losses.append(float(hvd.allreduce(training_step(x, y, batch == 0), name="loss")))
    if batch % 50 == 0 and hvd.rank() == 0:
        print(f"step {batch}: loss {losses[-1]:.4f}")

# Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting them.
if hvd.rank() == 0:
    tf.train.Checkpoint(model=model).save("checkpoints/loop")

digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()[:16]
print(f"rank {hvd.rank()}: loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}")
