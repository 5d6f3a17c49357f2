"""Pure adapters: a wire array -> transcript, edits -> wire array. One module a dialect."""
