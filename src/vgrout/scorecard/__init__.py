"""The scorecard: every intervention and monitor in the same settings, and yours beside ours."""
