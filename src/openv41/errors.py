"""Every error that openv41 raises on purpose.

    OpenV41Error
    ├── ConfigError (also a ValueError)   a configuration that no model can be built from
    ├── CheckpointError                   files of weights that do not fit the configuration
    ├── InputError                        a prompt, an image or an argument of the caller
    ├── CacheError                        a conversation asked to do what its cache cannot
    │   └── CacheFull                     no room left for another token
    ├── TrainingStopped                   a run whose numbers went wrong, with what and where
    └── OpsError                          a shape or an operation that the chosen device does not support

A message says the field, the value, the rule and the way out.
"""


class OpenV41Error(Exception):
    """The root: catch it to catch everything that openv41 raises on purpose."""


class ConfigError(OpenV41Error, ValueError):
    """A configuration is unreadable, incomplete, or contradicts itself."""


class CheckpointError(OpenV41Error):
    """A checkpoint is unreadable, or lacks, adds or misshapes a tensor."""


class InputError(OpenV41Error):
    """A prompt, an image or an argument given by the caller cannot be used."""


class CacheError(OpenV41Error):
    """A cache cannot do what was asked: an unknown slot, a rewind too far, a foreign save."""


class CacheFull(CacheError):
    """A conversation has reached the length that its cache was opened for."""


class TrainingStopped(OpenV41Error):
    """A training run met a number that is not finite, or a loss that grew out of hand."""


class OpsError(OpenV41Error):
    """An operation does not support this shape, type or device."""
