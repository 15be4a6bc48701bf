"""Texts that models are verified and measured on: the user's samples, or these texts of 5 to 150 words.

`TEXTS` are fitted to, timed and judged; `MORE_TEXTS` are judged as well where that takes seconds. The texts were
written for this project. A user's own samples say more about the user's own quality.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from builder.common.errors import SpecError
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

MORE_TEXTS: tuple[str, ...] = (
    "The bridge is closed to lorries.",
    "My flight was delayed by five hours.",
    "Where can I park near the stadium?",
    "Never again: the soup was cold and the bill was wrong.",
    "Inflation fell to two percent in October.",
    "How do I reset the router to factory settings?",
    "The goalkeeper saved two penalties in the final minute.",
    "Our cat sleeps on the piano.",
    "This lamp is brighter than it looks in the picture.",
    "The parliament rejected the bill by a single vote.",
    "Take one tablet in the morning with plenty of water.",
    "I finished the novel in one night and started it again.",
    "Copper conducts heat better than iron.",
    "Is breakfast included in the price of the room?",
    "The suspect was released after questioning.",
    "Rain is expected along the northern coast from Tuesday on.",
    "Please confirm the address before we ship your parcel.",
    "The app closes whenever I open the camera.",
    "Great sound, poor microphone, average battery.",
    "The theatre in Prague reopened after six years of work.",
    "Carlos Mendes was appointed head of the port authority in Valparaíso.",
    "The warranty covers parts and labour for three years.",
    "You can cancel the subscription at any time in your account.",
    "The seeds should be sown in March, two centimetres deep and a hand apart.",
    "A thin crust of ice covered the pond, but it would not carry a child.",
    "He missed the last bus and walked eleven kilometres through the fog.",
    "The vaccine must be stored between two and eight degrees.",
    "Shares of the airline lost a tenth of their value after the strike was announced.",
    "She asked for a refund, got a voucher, and wrote to the ombudsman.",
    "The lecture on medieval trade routes was moved to the large hall.",
    "Whoever parks in front of the gate will be towed away.",
    "The new tram line connects the hospital with the central station in twelve minutes.",
    "Turn left at the chapel, follow the wall, and you will see the vineyard below you.",
    "The sequel repeats every joke of the first film, only slower.",
    "Two thirds of the households in the valley heat with wood.",
    "The contract ends on 30 June unless either party renews it in writing.",
    "Keep the receipt: without it we can neither exchange nor repair the watch.",
    "Marta Kowalska won the regatta off Gdynia by less than a metre.",
    "The bakery sells rye bread on weekdays and sweet rolls on Sundays.",
    "Scientists found traces of the volcano's ash in a lake nine hundred kilometres away.",
    "The door jams in wet weather; lift the handle while you push.",
    "I ordered the blue one, received the green one, and now like it better.",
    "The choir rehearses on Mondays, except in August, when the church is full of tourists.",
    "Unemployment among people under twenty-five rose for the third month in a row.",
    "To descale the kettle, boil a mixture of water and vinegar, wait, and rinse it twice.",
    "The judge allowed the appeal because a witness had never been heard.",
    "The hikers were found unharmed on Saturday evening, a day after they had lost the trail.",
    "Its engine is quiet, its seats are hard, and the boot holds exactly one suitcase.",
    "The reef recovered faster than expected once fishing with dynamite had stopped.",
    "Would you please tell me whether the pharmacy on Elm Street is open on public holidays?",
    "The district has three schools, one doctor, and no swimming pool.",
    "After the update my printer prints every page twice, even from the phone.",
    "The prize went to a chemist from Nagoya who makes plastics that dissolve in sea water.",
    "The old harbour crane, built in 1911, will be turned into a café with a view over the docks.",
    "He explained the rules of the game so well that even my grandmother won a round.",
    "The bank raised its interest rate by a quarter of a point, as most analysts had predicted.",
    "Our guide spoke four languages and knew the name of every bird that we saw.",
    "If the patient has a rash, stop the treatment at once and inform the clinic.",
    "The painting had hung in a dentist's waiting room for forty years before anybody recognised it.",
    "A loose cable behind the dashboard made the radio change stations whenever the car turned right.",
    "The museum lends bicycles to visitors, so that they can see the three windmills along the canal as well.",
    "We tested nine rucksacks in the rain: four leaked at the zip, two at the seams, and three stayed dry inside.",
    "In the second half the visitors pressed higher, won the ball in midfield and scored twice within six minutes.",
    "The company will close its plant in Leuven by the end of the year; the four hundred people who work there "
    "have been offered jobs at the site in Ghent.",
    "I was sceptical about an electric mower, but it starts at once, cuts wet grass without trouble and can be "
    "stored upright behind the shed. The only drawback is the price of a second battery.",
    "The council decided last night to plant eight hundred trees along the ring road. Residents had complained for "
    "years about noise and dust. Work begins in autumn, and the first section should be finished before winter.",
    "Soak the beans overnight, throw the water away, and cook them gently for an hour. Fry onions and garlic, add "
    "tomatoes, thyme and a bay leaf, then the beans. It tastes better on the second day.",
    "The telescope sees in infrared light, which passes through clouds of dust. Astronomers hope to watch stars "
    "form there, and to find water in the air of planets that circle small red suns.",
    "Dear Ms Okafor, thank you for your application. We were impressed by your portfolio and would like to invite "
    "you to an interview on 14 May at ten o'clock. Please bring the originals of your certificates.",
    "The river rose four metres in a night. By morning the water stood in the cellars of the lower town, the "
    "footbridge was gone, and soldiers were filling sandbags on the market square together with the pupils of two "
    "schools, which had been closed for the day.",
    "This is the third pair of these boots that I have bought. The first lasted nine winters, the second seven; "
    "the new ones are lighter, the soles grip better on ice, and the leather needed no time to soften. I hope that "
    "the maker never changes them again.",
    "When the translator died, her notebooks went to the university library. Nobody looked at them until a student "
    "found, between lists of words, the first chapters of a novel. It has now been published, and critics compare "
    "it with the books that she had translated all her life.",
    "The fishermen of the island elect a council that says who may fish where, and how much. The rules are older "
    "than the harbour. Economists who expected the stock to collapse came to study it, and left with a list of "
    "what other places could learn: small groups, clear borders, and fines that hurt a little.",
    "Before you call us, please switch the machine off, wait for ten seconds and switch it on again. If the red "
    "light still blinks, count how often: two means that the filter is blocked, three that the door is not shut, "
    "four that the pump is defective. In the last case do not open the cover yourself.",
    "The trial lasted eleven weeks and heard ninety witnesses. In the end it turned on a parking ticket, which "
    "showed that the accused had been on the other side of the city when the warehouse burned. The prosecutor "
    "withdrew the charge, and the insurer has asked for the case to be opened again.",
    "Children learn the names of colours later than one would think. They hear the words every day, but must find "
    "out that the words are not about cups or socks. Experiments show that it helps to name the thing first, and "
    "its colour after it: not the red ball, but the ball that is red.",
)


def with_mask(sample: Mapping[str, Any], mask: str) -> dict[str, Any]:
    """Return the sample with the checkpoint's own mask token where its texts say `{mask}`."""
    return {key: value.replace("{mask}", mask) if isinstance(value, str) else value for key, value in sample.items()}


def load_samples(path: Path, fields: Sequence[Field], labels: Sequence[str] = ()) -> tuple[dict[str, Any], ...]:
    """Read JSON lines, one sample per line, its keys the task's inputs and, in all or in none, its `labels`.

    Raises SpecError with the line's number.
    """
    try:
        lines = path.read_text("utf-8").split("\n")  # not splitlines: texts contain Unicode's other line ends
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
