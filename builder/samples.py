"""What models are verified and measured on: the user's samples, or these texts of 5 to 150 words.

The texts were written for this project. A user's own samples say more about the user's own quality.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from builder.errors import SpecError
from builder.runtime.fields import Field

TEXTS: tuple[str, ...] = (
    "The train to the coast leaves at nine.",
    "Please send the invoice before Friday.",
    "I would not buy this kettle again.",
    "A fox crossed the frozen river at dawn.",
    "Our team in Lisbon won the regional final.",
    "The new battery lasts almost two full days.",
    "She plays the cello better than anyone here.",
    "Nobody answered the phone at the clinic.",
    "Prices for wheat rose again after the dry spring.",
    "The museum in Oslo is closed for repairs until May.",
    "My order arrived late, the box was torn and one of the two glasses was broken.",
    "Mario Rossi moved from Turin to Boston last year to study marine biology.",
    "The committee will vote on the budget next week, and most members expect it to pass.",
    "Add the flour slowly, stir until the lumps are gone, then let the batter rest for an hour.",
    "Water expands when it freezes, which is why pipes burst in cold winters and bottles crack.",
    "The film starts slowly, but the last half hour is as tense as anything shown this year.",
    "He forgot his password three times in one week and had to call the support desk each time.",
    "Anna Schmidt founded the company in Hamburg in 1998 and sold it to a Swedish bank in 2011.",
    "The recipe is simple: roast the peppers, peel them, and dress them with oil, salt and a little vinegar.",
    "Light from the star takes eleven years to reach us, so we see it now as it was more than a decade ago.",
    "The hotel was clean and quiet, the staff could not have been kinder, and breakfast was served until noon; "
    "we will certainly come back next summer with the children.",
    "After the storm the village had no power for four days. Neighbours shared their stoves, the school became a "
    "shelter, and the baker kept working by candlelight.",
    "The update fixed the crash on start, yet the program now uses twice the memory it used before and the fan of "
    "my laptop never stops, so I went back to the old version.",
    "In the second quarter the firm sold nine thousand bicycles, a fifth more than a year earlier, while the cost "
    "of steel and shipping fell for the first time since the harbour was closed.",
    "Bees find their way by the sun. Even under clouds they see how its light is polarised, and a scout that has "
    "found flowers dances in the dark of the hive to tell the others how far they must fly and in which direction.",
    "The court in Nairobi ruled on Tuesday that the ministry must publish the contracts it signed with the two "
    "mining companies. A spokesman for the ministry said that it would study the judgment before it decides "
    "whether to appeal, and that the documents would remain closed until then.",
    "We walked for six hours through beech woods, along a stream that was loud with melting snow, and came at last "
    "to a hut where an old man sold soup. He told us that the path over the pass was still closed, that two "
    "hikers had turned back the day before, and that we would do well to sleep there and take the lower road.",
    "To change the filter, first switch the machine off and let it cool. Open the cover on the left side, press the "
    "grey lever down, and pull the old filter straight out. Wipe the seat with a dry cloth, push the new filter "
    "in until it clicks, and close the cover. Run one cycle without coffee, pour the water away, and reset the "
    "counter by holding both buttons for five seconds. If the light still blinks, repeat the last step.",
    "The orchestra opened with a short piece by a composer nobody in the hall had heard of, and for a few minutes "
    "the audience was polite and a little bored. Then the soloist came on. She played the concerto without a "
    "score, faster than it is usually taken, and with such ease that the hard passages sounded like a walk. At "
    "the end people stood up before the last note had faded, and she had to come back five times.",
    "Early maps of the strait were drawn by sailors who measured depth with a rope and a lump of lead. The bottom "
    "of the lead was hollow and filled with tallow, so that a little sand or mud stuck to it and told the "
    "captain what lay below. From thousands of such soundings, written into log books over two centuries, the "
    "first charts were made; they were so careful that parts of them were still in use when sonar replaced the "
    "rope. Only the banks near the river mouth had moved.",
    "The patient reported a dull pain behind the right eye that had begun about three weeks earlier, was worse in "
    "the morning, and eased after an hour or two of being upright. There was no fever, no loss of weight and no "
    "change in vision. She had taken painkillers almost every day. The examination was normal apart from "
    "tenderness over the neck on the same side. We advised her to stop the painkillers, to keep a diary of her "
    "headaches, to move more and to come back in a month; if the pain should change, or if she should see "
    "double or vomit, she was to come at once. Four weeks later the pain had gone, and the diary showed that it "
    "had faded within days of the last tablet.",
    "Dear all, thank you for coming to the meeting on Thursday. We agreed on three things. First, the kitchen on "
    "the second floor will be rebuilt in March, and until then everyone may use the one on the fourth. Second, "
    "deliveries will no longer be left at the door: the post room signs for them and sends a message. Third, "
    "the car park will have ten places for bicycles and two for charging; whoever wants to use them should "
    "write to Ms Novak by the end of the month. The question of the heating was left open, because the offer of "
    "the contractor came too late to be read. It is attached, together with the minutes. Please send comments "
    "before the next meeting, which will be on the ninth at half past two in the small hall, and tell your "
    "colleagues who could not come. With kind regards from the house committee.",
)


def with_mask(sample: Mapping[str, Any], mask: str) -> dict[str, Any]:
    """The sample with the checkpoint's own mask token where its texts say `{mask}`."""
    return {key: value.replace("{mask}", mask) if isinstance(value, str) else value for key, value in sample.items()}


def load_samples(path: Path, fields: Sequence[Field], labels: Sequence[str] = ()) -> tuple[dict[str, Any], ...]:
    """Read JSON lines, one sample a line, its keys the task's inputs and, in all or in none, its `labels`.

    Raises SpecError with the line's number.
    """
    try:
        lines = path.read_text("utf-8").split("\n")  # and by nothing else that ends a line in Unicode: texts have that
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--samples {path} cannot be read as UTF-8: {error}") from error
    known = {field.name for field in fields}
    required = {field.name for field in fields if not field.optional}
    samples: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise SpecError(f"--samples {path}, line {number}, is not JSON: {error}") from error
        if not isinstance(sample, dict) or not required <= set(sample) <= known | set(labels):
            raise SpecError(
                f"--samples {path}, line {number}: expected an object with {', '.join(sorted(required))}"
                f" (and perhaps {', '.join([*sorted(known - required), *labels])}); found {str(line)[:80]}"
            )
        if samples and set(labels) & set(sample) != set(labels) & set(samples[0]):
            raise SpecError(
                f"--samples {path}, line {number}: {' and '.join(labels)} must be in every line or in none; found "
                f"{str(line)[:80]}"
            )
        samples.append(sample)
    if not samples:
        raise SpecError(f"--samples {path} holds no sample; write one JSON object a line")
    return tuple(samples)
