"""Loads TensorFlow without its start-up lines, which say nothing about the user's graph."""

from __future__ import annotations

__all__ = ["load_tensorflow_quietly"]

import os
import re
import sys
import tempfile

_CHATTER = re.compile(rb"^([IWE]0000 |WARNING: All log messages before absl)")


def load_tensorflow_quietly() -> None:
    """Imports TensorFlow, for CPUs only; its log lines are dropped, anything else that it prints is passed on.

    TensorFlow's C++ part writes to the process's file descriptor, so that is what is put aside for the time being.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    if "tensorflow" in sys.modules:
        return
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with tempfile.TemporaryFile() as aside:
            os.dup2(aside.fileno(), 2)
            try:
                import tensorflow as tf

                # The devices are looked for, and the first session says its piece, now rather than later. That session
                # also sizes the thread pool of kernels for good: one thread, as the in-process ranks want it.
                tf.config.list_physical_devices()
                config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, use_per_session_threads=True)
                with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
                    session.run(tf.constant(0))
            finally:
                os.dup2(saved, 2)
                aside.seek(0)
                lines = [line for line in aside.read().splitlines(keepends=True) if not _CHATTER.match(line)]
                os.write(2, b"".join(lines))
    finally:
        os.close(saved)
