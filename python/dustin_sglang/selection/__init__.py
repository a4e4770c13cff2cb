"""Which positions a verification reads: pure functions over tensors and one small state class. Knows no SGLang type."""
