from __future__ import annotations

from user_modules import fake_udf, folder

__all__ = ["fake_udf", "folder"]
