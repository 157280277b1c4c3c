"""From graphs to the files that runtimes load: ONNX models, training artifacts, checkpoints."""

if __name__ == "export":  # would load its modules twice
    raise ImportError("import graphgen.export, not export")
