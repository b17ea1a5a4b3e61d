"""A fully convolutional network in mixed precision: where are the squares in a noisy image?"""

import hashlib

import numpy as np

import gradred.tensorflow.keras as hvd
import tensorflow as tf

# Horovod: initialize Horovod.
hvd.init()

# Horovod: pin the GPU to be used to process the local rank (one GPU per process).
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

tf.keras.mixed_precision.set_global_policy("mixed_float16")


def batches(count, rows=4):
    """Images of another size in each batch, and in each rank's."""
    generator = np.random.default_rng([7, hvd.rank()])
    for _ in range(count):
        height, width = 8 * generator.integers(1, 4, 2)
        masks = np.zeros((rows, height, width, 1), np.float32)
        for mask in masks:
            top, left = generator.integers(0, height - 4), generator.integers(0, width - 4)
            mask[top : top + 4, left : left + 4] = 1.0
        images = masks + generator.normal(scale=0.3, size=masks.shape).astype(np.float32)
        yield images, masks


steps, epochs = 20, 3
images = tf.TensorSpec((None, None, None, 1), tf.float32)
dataset = tf.data.Dataset.from_generator(
    lambda: batches(steps * epochs), output_signature=(images, images)
)


def block(x, filters):
    x = tf.keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    x = hvd.SyncBatchNormalization(momentum=0.8)(x)
    return tf.keras.layers.Activation("relu")(x)


inputs = tf.keras.Input((None, None, 1))
fine = block(inputs, 4)
coarse = block(tf.keras.layers.MaxPooling2D()(fine), 8)
joined = tf.keras.layers.Concatenate()([fine, tf.keras.layers.UpSampling2D()(coarse)])
x = block(joined, 8)
outputs = tf.keras.layers.Conv2D(1, 1)(x)
outputs = tf.keras.layers.Activation("sigmoid", dtype="float32")(outputs)
model = tf.keras.Model(inputs, outputs)

# Horovod: adjust the learning rate based on the number of processes; gradients travel as float16.
opt = tf.keras.optimizers.Adam(0.01 * hvd.size())
opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)

# Under mixed_float16 Keras puts a LossScaleOptimizer around it.
model.compile(optimizer=opt, loss=tf.keras.losses.BinaryCrossentropy())

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    # Written by rank 0.
    hvd.callbacks.BestModelCheckpoint(monitor="loss"),
]
callbacks[-1].filepath = "checkpoints/segmentation.keras"

history = model.fit(
    dataset,
    steps_per_epoch=steps,
    epochs=epochs,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
).history

losses = history["loss"]
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()[:16]
print(f"rank {hvd.rank()}: loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}")
