//! sieve-kernels
