"""What all tests share: properties are judged by their result, never by the clock."""

from hypothesis import settings

settings.register_profile("shoal", deadline=None)
settings.load_profile("shoal")
