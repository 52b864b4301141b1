"""The nouns: typed, validated once, read and written as YAML. No torch."""
