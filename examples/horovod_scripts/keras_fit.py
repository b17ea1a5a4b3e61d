"""Training with Keras' fit: in which quarter of an image is the bright spot?"""

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

# Samples of this rank's own.
generator = np.random.default_rng(hvd.rank())
labels = generator.integers(0, 4, 512)
images = generator.normal(scale=0.5, size=(512, 8, 8, 1)).astype(np.float32)
for image, label in zip(images, labels, strict=True):
    image[4 * (label // 2) + 1, 4 * (label % 2) + 2] += 4.0

dataset = tf.data.Dataset.from_tensor_slices((images, labels))
dataset = dataset.repeat().shuffle(512).batch(16)

model = tf.keras.Sequential(
    [
        tf.keras.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(8, 3, padding="same"),
        hvd.SyncBatchNormalization(momentum=0.8),
        tf.keras.layers.Activation("relu"),
        tf.keras.layers.MaxPooling2D(4),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(4, activation="softmax"),
    ]
)

# Horovod: adjust the learning rate based on the number of processes.
scaled_lr = 0.02 * hvd.size()
opt = tf.keras.optimizers.SGD(scaled_lr, momentum=0.9)

# Horovod: add Horovod DistributedOptimizer.
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)

model.compile(
    loss=tf.keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"]
)

callbacks = [
    # Horovod: broadcast initial variable states from rank 0 to all other processes.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # Horovod: average metrics among workers at the end of every epoch. It must come before
    # callbacks that use metrics.
    hvd.callbacks.MetricAverageCallback(),
    # Horovod: lr = 1.0 leads to lr = 1.0 * size after the first epochs.
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=1),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=scaled_lr, multiplier=0.1, start_epoch=3),
]

# Horovod: save checkpoints only on worker 0 to prevent other workers from corrupting them.
if hvd.rank() == 0:
    callbacks.append(
        tf.keras.callbacks.ModelCheckpoint("checkpoints/{epoch}.weights.h5", save_weights_only=True)
    )

# Horovod: write logs on worker 0.
verbose = 2 if hvd.rank() == 0 else 0

history = model.fit(
    dataset, steps_per_epoch=16, callbacks=callbacks, epochs=4, verbose=verbose
).history

losses = history["loss"]
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()[:16]
print(f"rank {hvd.rank()}: loss {losses[0]:.4f} to {losses[-1]:.4f}, weights {digest}")
