"""The admission webhook: what is refused when it is applied, in the words that a status would use later."""
