//! Turns EC2's refusals into provider errors: class, cause, remedy. Pure.
//!
//! Codes: EC2 API reference, "Error codes", and those that karpenter treats as lack of capacity. STS, which issues the
//! credentials, has some of them, too.

use peerpod_provider_api::Error;
use peerpod_provider_cloud::refusal::{Meaning, Refusals, Row, clip};

use Meaning::{Auth, Capacity, Invalid, KeyReused, NotFound, Quota, Throttled, Transient};

/// Failed call: the error to return, and EC2's answer.
#[derive(Debug)]
pub(crate) struct AwsFailure {
    pub error: Error,
    /// EC2's code and message; empty if EC2 did not answer.
    code: String,
    message: String,
}

pub(crate) enum Why {
    /// EC2 answered with an error and this HTTP status.
    Said {
        code: String,
        message: String,
        status: u16,
    },
    /// The request was sent, but not answered; EC2 may have executed it.
    NoAnswer(String),
    /// There are no credentials for the signature.
    NoCredentials(String),
    Unsent(String),
}

impl AwsFailure {
    /// Returns the failure of this call of an action, like `CreateFleet`, for an attempt, like `create of web-0`.
    pub(crate) fn new(action: &str, what: &str, why: Why) -> AwsFailure {
        AwsFailure::of(&REFUSALS, action, what, why)
    }

    /// Same as [`AwsFailure::new`], for another service of AWS.
    pub(crate) fn of(refusals: &Refusals, action: &str, what: &str, why: Why) -> AwsFailure {
        let (mut code, mut message) = (String::new(), String::new());
        let error = match why {
            Why::Said { code: said, message: words, status } => {
                let error = refusals.refused(action, &said, plain(&words), status, None);
                (code, message) = (said, words);
                error
            }
            Why::NoAnswer(why) => refusals.unanswered(action, &why),
            Why::NoCredentials(why) => Error::Auth {
                text: format!(
                    "{action} could not be signed: {}; give access-key-id and secret-key, a profile, or let the node or its \
                     service account have a role (IRSA, pod identity, instance profile)",
                    clip(&why)
                ),
            },
            Why::Unsent(why) => Error::invalid(format!(
                "{action} could not be built: {}; correct the settings below provider.aws",
                clip(&why)
            )),
        };
        AwsFailure { error: error.during(what), code, message }
    }

    /// Returns EC2's error code; empty without one.
    pub(crate) fn code(&self) -> &str {
        &self.code
    }

    /// Returns the ids that EC2's message (of a `…NotFound`) names.
    pub(crate) fn ids(&self, prefix: &str) -> Vec<String> {
        let words = self.message.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
        words
            .filter(|word| word.starts_with(prefix) && word.len() > prefix.len())
            .map(str::to_owned)
            .collect()
    }
}

impl From<Error> for AwsFailure {
    fn from(error: Error) -> AwsFailure {
        AwsFailure { error, code: String::new(), message: String::new() }
    }
}

impl From<AwsFailure> for Error {
    fn from(failure: AwsFailure) -> Error {
        failure.error
    }
}

impl AsRef<Error> for AwsFailure {
    fn as_ref(&self) -> &Error {
        &self.error
    }
}

/// Refusals of EC2 and STS.
pub(crate) const REFUSALS: Refusals = Refusals { cloud: "EC2", rows: ROWS, usual };

/// Refusals of the EBS direct APIs.
pub(crate) const EBS: Refusals = Refusals { cloud: "EBS", rows: EBS_ROWS, usual };

const EBS_ROWS: &[Row] = &[
    Row::code("AccessDeniedException", Auth)
        .remedy("allow ebs:{action} to this identity (providers/aws/image-policy.json is the whole list)"),
    Row::code("UnrecognizedClientException", Auth).remedy(KEY),
    Row::code("ExpiredTokenException", Auth).remedy(RENEW),
    Row::code("RequestThrottledException", Throttled),
    Row::code("ServiceQuotaExceededException", Quota).remedy(SNAPSHOTS),
    Row::code("ConcurrentLimitExceededException", Quota).remedy(SNAPSHOTS),
    Row::code("ResourceNotFoundException", NotFound),
    Row::status(429..=429, Throttled),
    Row::status(500..=u16::MAX, Transient),
];

/// Refusals of Service Quotas.
pub(crate) const QUOTAS: Refusals = Refusals {
    cloud: "Service Quotas",
    rows: QUOTA_ROWS,
    // The provider does not look again before the next preflight.
    usual: |_| "aws service-quotas get-service-quota --service-code ec2 looks it up",
};

const QUOTA_ROWS: &[Row] = &[
    Row::code("AccessDeniedException", Auth).remedy("allow servicequotas:{action} to this identity"),
    Row::code("UnrecognizedClientException", Auth).remedy(KEY),
    Row::code("ExpiredTokenException", Auth).remedy(RENEW),
    Row::code("TooManyRequestsException", Throttled),
    Row::code("ThrottlingException", Throttled),
    Row::code("NoSuchResourceException", NotFound),
    Row::status(429..=429, Throttled),
    Row::status(500..=u16::MAX, Transient),
];

const SNAPSHOTS: &str = "delete pending snapshots, or raise the account's limit (Service Quotas, Amazon EBS)";
const HIGHER_QUOTA: &str = "ask for a higher quota of this instance family (Service Quotas, Amazon EC2), or allow other instance-types";
const ALLOW: &str = "allow ec2:{action} to this identity (providers/aws/iam-policy.json is the whole list, and \
                     image-policy.json that of image uploads)";
const RENEW: &str = "renew the credentials, and check the node's clock";
const KEY: &str = "use an access key that exists and is active";
const IMAGE: &str = "set image-id to an AMI of this region that is shared with the account";
const SUBNET: &str = "set subnet-ids to subnets of this region and account";
const GROUP: &str = "set security-group-ids to groups in the VPC of subnet-ids";
const PROFILE: &str = "set instance-profile to one that exists";
const TEMPLATE: &str = "correct launch-template, or remove it to have one made";

const ROWS: &[Row] = &[
    Row::code("RequestLimitExceeded", Throttled),
    Row::code("Throttling", Throttled),
    Row::code("ThrottlingException", Throttled),
    Row::code("ThrottledException", Throttled),
    Row::code("RequestThrottled", Throttled),
    Row::code("RequestThrottledException", Throttled),
    Row::code("EC2ThrottledException", Throttled),
    Row::code("TooManyRequestsException", Throttled),
    Row::code("SlowDown", Throttled),
    Row::code("BandwidthLimitExceeded", Throttled),
    Row::code("InsufficientInstanceCapacity", Capacity),
    Row::code("InsufficientHostCapacity", Capacity),
    Row::code("InsufficientReservedInstanceCapacity", Capacity),
    Row::code("InsufficientCapacity", Capacity),
    Row::code("InsufficientFreeAddressesInSubnet", Capacity).remedy("give larger or more subnet-ids"),
    Row::code("InsufficientAddressCapacity", Capacity),
    Row::code("UnfulfillableCapacity", Capacity),
    Row::code("ReservationCapacityExceeded", Capacity),
    Row::code("SpotMaxPriceTooLow", Capacity),
    Row::code("Unsupported", Capacity)
        .remedy("allow instance-types that exist in these zones, or give subnet-ids in others"),
    Row::code("MaxFleetCountExceeded", Capacity),
    Row::code("PendingVerification", Quota),
    Row::code("VcpuLimitExceeded", Quota).remedy(HIGHER_QUOTA),
    Row::code("InstanceLimitExceeded", Quota).remedy(HIGHER_QUOTA),
    Row::code("MaxSpotInstanceCountExceeded", Quota).remedy(HIGHER_QUOTA),
    Row::code("AttachmentLimitExceeded", Quota)
        .remedy("use a larger instance type, or fewer volumes in the pod"),
    Row::code("UnauthorizedOperation", Auth).remedy(ALLOW),
    Row::code("AccessDenied", Auth).remedy(ALLOW),
    Row::code("AccessDeniedException", Auth).remedy(ALLOW),
    Row::code("InvalidClientTokenId", Auth).remedy(KEY),
    Row::code("UnrecognizedClientException", Auth).remedy(KEY),
    Row::code("ExpiredToken", Auth).remedy(RENEW),
    Row::code("ExpiredTokenException", Auth).remedy(RENEW),
    Row::code("RequestExpired", Auth).remedy(RENEW),
    Row::code("SignatureDoesNotMatch", Auth).remedy("correct the secret key, and check the node's clock"),
    Row::code("IncompleteSignature", Auth),
    Row::code("MissingAuthenticationToken", Auth),
    Row::code("InvalidIdentityToken", Auth),
    Row::code("OptInRequired", Auth)
        .remedy("subscribe the account to EC2 (or to the image, if it is from the marketplace)"),
    Row::code("Blocked", Auth),
    Row::code("AuthFailure.ServiceLinkedRoleCreationNotPermitted", Auth).remedy(
        "create the spot service-linked role once: aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
    ),
    Row::code("AuthFailure", Auth)
        .remedy("check the access key, its secret, and that the account may use this region and image"),
    Row::code("AuthFailure*", Auth),
    Row::code("InvalidInstanceID.NotFound", NotFound),
    Row::code("InvalidVolume.NotFound", NotFound),
    Row::code("InvalidAttachment.NotFound", NotFound),
    Row::code("IdempotentParameterMismatch", KeyReused),
    Row::code("InternalError", Transient),
    Row::code("InternalFailure", Transient),
    Row::code("ServiceUnavailable", Transient),
    Row::code("Unavailable", Transient),
    Row::code("InvalidAMIID.NotFound", Invalid).remedy(IMAGE),
    Row::code("InvalidAMIID.Malformed", Invalid).remedy(IMAGE),
    Row::code("InvalidAMIID.Unavailable", Invalid).remedy(IMAGE),
    Row::code("InvalidSubnetID.NotFound", Invalid).remedy(SUBNET),
    Row::code("InvalidSubnet.NotFound", Invalid).remedy(SUBNET),
    Row::code("InvalidGroup.NotFound", Invalid).remedy(GROUP),
    Row::code("InvalidSecurityGroupID.NotFound", Invalid).remedy(GROUP),
    Row::code("InvalidGroupId.Malformed", Invalid).remedy(GROUP),
    Row::code("InvalidKeyPair.NotFound", Invalid)
        .remedy("set key-name to a key pair of this region, or remove it"),
    Row::code("InvalidIamInstanceProfileArn.Malformed", Invalid).remedy(PROFILE),
    Row::code("InvalidIamInstanceProfileName.NotFound", Invalid).remedy(PROFILE),
    Row::code("InvalidUserData.Malformed", Invalid)
        .remedy("user-data must have at most 16 KiB; this is a bug in Peerpod, report it"),
    Row::code("InvalidInstanceType", Invalid).remedy("correct instance-type and instance-types"),
    Row::code("InvalidVolume.ZoneMismatch", Invalid).remedy("give a subnet in the volume's zone"),
    Row::code("VolumeInUse", Invalid)
        .remedy("end the pod or instance that uses the volume; it attaches to one VM only"),
    Row::code("InvalidLaunchTemplateName.NotFoundException", Invalid).remedy(TEMPLATE),
    Row::code("InvalidLaunchTemplateId.NotFound", Invalid).remedy(TEMPLATE),
    Row::code("*LimitExceeded", Quota),
    Row::code("*CountExceeded", Quota),
    Row::status(429..=429, Throttled),
    Row::status(500..=u16::MAX, Transient),
];

/// Returns the remedy for a code that has none of its own.
fn usual(meaning: Meaning) -> &'static str {
    match meaning {
        Throttled => "it is tried again more slowly; others in the account use the same limit",
        Capacity => "allow more instance-types or give subnet-ids in more zones",
        Quota => "raise the account's limit (Service Quotas, Amazon EC2)",
        Auth => "check the credentials and their permissions",
        Transient => "it is tried again; if it stays, look at the AWS health dashboard",
        KeyReused => "this is a bug in Peerpod, report it",
        NotFound | Invalid => "correct the settings below provider.aws, or the pod's annotations",
    }
}

/// Returns a message without the kilobytes of ciphertext of EC2's authorization failures.
fn plain(message: &str) -> &str {
    message.split("Encoded authorization failure message").next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(code: &str, status: u16, message: &str) -> Error {
        let why = Why::Said { code: code.to_owned(), message: message.to_owned(), status };
        AwsFailure::new("CreateFleet", "create of web-0", why).error
    }

    #[test]
    fn every_row_of_the_table_is_used() {
        REFUSALS.check().unwrap();
        EBS.check().unwrap();
        QUOTAS.check().unwrap();
    }

    #[test]
    fn a_code_gives_the_class_and_the_text_gives_cause_and_remedy() {
        let cases = [
            ("RequestLimitExceeded", 503, "throttled", "more slowly"),
            ("InsufficientInstanceCapacity", 500, "capacity", "subnet-ids in more zones"),
            ("Unsupported", 400, "capacity", "exist in these zones"),
            ("InsufficientFreeAddressesInSubnet", 400, "capacity", "larger or more subnet-ids"),
            ("VcpuLimitExceeded", 400, "quota", "higher quota"),
            ("MaxSpotInstanceCountExceeded", 400, "quota", "higher quota"),
            ("VolumeLimitExceeded", 400, "quota", "Service Quotas"),
            ("UnauthorizedOperation", 403, "auth", "allow ec2:CreateFleet"),
            ("ExpiredToken", 400, "auth", "renew the credentials"),
            ("AuthFailure", 401, "auth", "check the access key"),
            ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 403, "auth", "create-service-linked-role"),
            ("InvalidParameterValue", 400, "invalid", "provider.aws"),
            ("InvalidAMIID.NotFound", 400, "invalid", "set image-id"),
            ("InvalidInstanceID.NotFound", 400, "not_found", ""),
            ("IdempotentParameterMismatch", 400, "key_reused", "bug in Peerpod"),
            ("InternalError", 500, "transient", "tried again"),
            ("SomethingNew", 502, "transient", "tried again"),
            ("SomethingNew", 400, "invalid", "correct the settings"),
            ("SomethingNew", 429, "throttled", "more slowly"),
        ];
        for (code, status, class, remedy) in cases {
            let error = said(code, status, "The cause.");
            assert_eq!(error.class(), class, "{code}");
            let text = error.to_string();
            assert!(
                text.starts_with(&format!("create of web-0: EC2 refused CreateFleet: {code}: The cause; ")),
                "{text}"
            );
            assert!(text.contains(remedy), "{remedy} in {text}");
        }
    }

    #[test]
    fn ciphertext_and_endless_messages_stay_out() {
        let message = format!("You may not. Encoded authorization failure message: {}", "x".repeat(3000));
        let text = said("UnauthorizedOperation", 403, &message).to_string();
        assert!(text.contains("You may not; allow") && text.len() < 300, "{text}");
        assert!(said("Odd", 400, &"y\n".repeat(5000)).to_string().len() < 700);
    }

    #[test]
    fn the_missing_ids_are_found_in_the_message() {
        let message = "The instance IDs 'i-0123, i-4567' do not exist".to_owned();
        let why = Why::Said { code: "InvalidInstanceID.NotFound".to_owned(), message, status: 400 };
        assert_eq!(AwsFailure::new("TerminateInstances", "", why).ids("i-"), ["i-0123", "i-4567"]);
    }

    #[test]
    fn a_call_without_an_answer_may_have_had_its_effect() {
        let refusal = |why| AwsFailure::new("CreateFleet", "create of a", why).error;
        assert_eq!(refusal(Why::NoAnswer("reset".into())).class(), "transient");
        let none = refusal(Why::NoCredentials("no providers".into()));
        assert!(none.class() == "auth" && none.to_string().contains("IRSA"), "{none}");
        assert_eq!(refusal(Why::Unsent("bad".into())).class(), "invalid");
    }
}
