"""What Horovod's scripts import from ``horovod.tensorflow.data``."""
