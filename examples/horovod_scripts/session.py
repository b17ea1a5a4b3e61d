"""Training with graphs and sessions of tf.compat.v1: a classifier of points on rings."""

import hashlib

import numpy as np

import gradred.tensorflow as hvd
import tensorflow as tf

tf.compat.v1.disable_eager_execution()

# Horovod: initialize Horovod.
hvd.init()

generator = np.random.default_rng(hvd.rank())


def next_batch(count=64):
    rings = generator.integers(0, 3, count)
    angles = generator.uniform(0, 2 * np.pi, count)
    radii = rings + 0.5 + generator.normal(scale=0.1, size=count)
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], 1), rings


def dense(x, width, name):
    with tf.compat.v1.variable_scope(name):
        kernel = tf.compat.v1.get_variable("kernel", [x.shape[1], width])
        bias = tf.compat.v1.get_variable("bias", [width], initializer=tf.zeros_initializer())
    return tf.matmul(x, kernel) + bias


points = tf.compat.v1.placeholder(tf.float32, [None, 2], name="points")
rings = tf.compat.v1.placeholder(tf.int32, [None], name="rings")
hidden = tf.nn.relu(dense(points, 32, "first"))
hidden = tf.nn.relu(dense(hidden, 32, "second"))
logits = dense(hidden, 3, "last")
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=rings, logits=logits))

# Horovod: adjust the learning rate based on the number of processes.
opt = tf.compat.v1.train.AdamOptimizer(0.005 * hvd.size())

# Horovod: add Horovod Distributed Optimizer.
opt = hvd.DistributedOptimizer(opt, op=hvd.Average)

global_step = tf.compat.v1.train.get_or_create_global_step()
train_op = opt.minimize(loss, global_step=global_step)
final = tf.compat.v1.train.FinalOpsHook(tf.compat.v1.trainable_variables())

hooks = [
    # Horovod: BroadcastGlobalVariablesHook broadcasts initial variable states from rank 0 to all
    # other processes.
    hvd.BroadcastGlobalVariablesHook(0),
    # Horovod: adjust the number of steps based on the number of processes.
    tf.compat.v1.train.StopAtStepHook(last_step=200 // hvd.size()),
    tf.compat.v1.train.LoggingTensorHook({"step": global_step, "loss": loss}, every_n_iter=50),
    final,
]

# Horovod: pin the GPU to be used to process the local rank (one GPU per process).
config = tf.compat.v1.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())

# Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting them.
checkpoint_dir = "checkpoints/session" if hvd.rank() == 0 else None

losses = []
with tf.compat.v1.train.MonitoredTrainingSession(
    checkpoint_dir=checkpoint_dir, hooks=hooks, config=config
) as mon_sess:
    while not mon_sess.should_stop():
        x, y = next_batch()
        _, value = mon_sess.run([train_op, loss], feed_dict={points: x, rings: y})
        losses.append(value)

weights = final.final_ops_values
digest = hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()[:16]
print(f"rank {hvd.rank()}: loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}")
