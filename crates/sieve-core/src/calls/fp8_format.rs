//! 8-bit floats.

/// An 8-bit float format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Format {
    /// Four bits of exponent, three of mantissa, up to 448: weights and activations.
    E4m3,
    /// Five bits of exponent, two of mantissa, up to 57344: gradients.
    E5m2,
}

impl Fp8Format {
    /// The number that an fp8 byte encodes.
    pub fn number_of(self, byte: u8) -> f32 {
        let byte = i32::from(byte);
        let (mantissa_bits, bias) = match self {
            Self::E4m3 => (3, 7),
            Self::E5m2 => (2, 15),
        };
        let exponent = byte >> mantissa_bits & (0x7f >> mantissa_bits);
        let mantissa = byte & ((1 << mantissa_bits) - 1);
        let fraction = mantissa as f32 / (1 << mantissa_bits) as f32;
        let magnitude = match exponent {
            // The GPU's conversion to fp8 writes only this NaN. It saturates, so it writes no infinity.
            _ if byte & 0x7f == 0x7f => f32::NAN,
            0 => fraction * 2f32.powi(1 - bias),
            _ => (1.0 + fraction) * 2f32.powi(exponent - bias),
        };
        match byte & 0x80 {
            0 => magnitude,
            _ => -magnitude,
        }
    }
}
