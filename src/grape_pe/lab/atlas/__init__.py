"""The atlas: every encoding of the registry, measured here and described by its own class.

`entries` what is known of one encoding · `cost` time of a step · `page` the HTML page · `markdown` the page of
the documentation.
"""
