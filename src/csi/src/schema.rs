//! Generates the published schema of a volume's descriptor. May touch: nothing.

use peerpod_volume::GuestVolume;

/// Returns the JSON Schema, as `deploy/schemas/guest-volume.json` holds it.
pub fn guest_volume() -> String {
    let schema = schemars::schema_for!(GuestVolume);
    // A generated schema always has a JSON form.
    let mut text = serde_json::to_string_pretty(&schema).unwrap_or_default();
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_published_schema_is_up_to_date() {
        let published = include_str!("../../../deploy/schemas/guest-volume.json");
        assert_eq!(
            published,
            super::guest_volume(),
            "write it anew: peerpod-csi schema >deploy/schemas/guest-volume.json"
        );
    }
}
