//! What ops of every family share on a device. Nothing here knows an op.
pub(crate) mod autodiff;
pub(crate) mod cuda;
pub(crate) mod flex;
pub(crate) mod paths;
