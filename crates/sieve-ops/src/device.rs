//! What ops of every family share on a device.
pub(crate) mod paths;
