"""What a checkpoint holds, however many processes wrote it."""

from safetensors.torch import load_file


def tensors_of(checkpoint, parts=("engine", "critic", "optimizer")):
    """Tensors as `<part>.<name>`, of the file or the files of each part."""
    found = {}
    for part in parts:
        for file in [*checkpoint.glob(f"{part}.safetensors"), *checkpoint.glob(f"{part}/*.safetensors")]:
            found |= {f"{part}.{name}": value for name, value in load_file(file).items()}
    return found
