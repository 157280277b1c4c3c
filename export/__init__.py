"""From graphs to the files that runtimes load: ONNX models, training artifacts, checkpoints."""
