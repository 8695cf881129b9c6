"""Logger that writes TensorBoard event files."""

from pathlib import Path

from bestiary.loggers.base import LogContext, Logger


class TensorBoardLogger(Logger):
    """TensorBoard event files in the run folder."""

    package = "tensorboard"
    install = "pip install 'bestiary[tensorboard]'"

    def __init__(self, context: LogContext):
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run logs the steps after `first_step` again. With `purge_step`, TensorBoard hides the events that an
        # earlier session logged for these steps.
        self.writer = SummaryWriter(str(context.folder / "tensorboard"), purge_step=context.first_step)

    def log(self, row: dict[str, float]) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, int(row["step"]))

    def log_video(self, name: str, path: Path, step: int) -> None:
        self._log_image(name, path, step)

    def log_figure(self, name: str, path: Path, step: int) -> None:
        self._log_image(name, path, step)

    def close(self) -> None:
        self.writer.close()

    def _log_image(self, name: str, path: Path, step: int) -> None:
        """Log an image file. TensorBoard plays GIF files, because browsers do."""
        import imageio.v3 as imageio
        from tensorboard.compat.proto.summary_pb2 import Summary

        *_, height, width, channels = imageio.improps(path).shape
        image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=path.read_bytes())
        summary = Summary(value=[Summary.Value(tag=name, image=image)])
        self.writer._get_file_writer().add_summary(summary, step)
