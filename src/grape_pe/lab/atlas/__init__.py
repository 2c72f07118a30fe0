"""The atlas of encodings: `entries` describes one, `cost` measures a step, `page` and `markdown` write it."""
