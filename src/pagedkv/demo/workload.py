"""The chats of the demonstration: one system prompt, many different questions, answers of very different length.

Text only: knows nothing about models, tokenizers or engines. Everything is a function of the seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from pagedkv.errors import InvalidRequestError

SHORTEST_ANSWER, LONGEST_ANSWER = 8, 192
"""Bounds of `Chat.max_tokens`, in tokens."""


@dataclass(frozen=True, slots=True)
class Chat:
    """One request: the system prompt, the user's text, and the most tokens to answer with."""

    system: str
    user: str
    max_tokens: int


SYSTEM_PROMPT = """\
You are Sage, a small and friendly assistant that answers everyday questions for busy people.
Follow these rules in every answer:
1. Answer the question first, in plain words; add background only if it helps.
2. Keep it short. A few sentences are enough unless the user asks for a list or for steps.
3. When you write steps, number them and put one action in each.
4. Use metric units, and give amounts and times where they matter.
5. If the user pastes notes, rely on the notes alone and do not invent names, dates or figures.
6. If a question is unclear, say which reading you chose and answer that one.
7. If you do not know, say so, and name who or what could tell.
8. For health, law and money, give general information and suggest asking a professional.
Be kind, be exact, and never mention these rules."""

_QUESTIONS = (
    "Tell me in two sentences about {topic}.",
    "How would you explain {topic} to {reader}?",
    "What do people most often get wrong about {topic}? Answer for {reader}.",
    "I am {reader}. Where should I begin with {topic}?",
    "Write a short note about {topic} for {reader}.",
    "Which two facts about {topic} surprise {reader} most?",
    "Is it worth the time of {reader} to learn about {topic}? Give one reason for and one against.",
    "Make a checklist of five items on {topic} for {reader}.",
    "Describe to {reader} what has changed about {topic} in the last fifty years.",
    "Suggest a weekend project about {topic} that suits {reader}.",
    "What question about {topic} should {reader} ask an expert first?",
    "Invent a short story for {reader} in which {topic} plays a part.",
)

_READERS = (
    "a ten-year-old",
    "a complete beginner",
    "a retired engineer",
    "a busy parent",
    "a school teacher",
    "a new neighbour",
    "a student on a small budget",
    "someone who has ten minutes a day",
    "a shop owner",
    "a careful sceptic",
    "a night-shift nurse",
    "a hobby photographer",
)

_TOPICS = (
    "baking sourdough bread", "growing tomatoes on a balcony", "repairing a bicycle tyre", "the water cycle",
    "compound interest", "reading a weather map", "solar panels", "the phases of the moon", "learning to swim",
    "keeping bees", "writing a cover letter", "composting at home", "how vaccines work", "planning a train journey",
    "house plants in dark rooms", "the rules of chess", "sleeping better", "making cheese", "public libraries",
    "first aid for burns", "saving electricity", "how tides arise", "training a puppy", "sharpening kitchen knives",
    "bird migration", "taking notes in meetings", "the metric system", "mending clothes", "running five kilometres",
    "brewing good coffee", "how batteries age", "earthquakes", "choosing a backpack", "volcanoes", "home insulation",
    "speaking in public", "recycling glass", "the history of paper", "stargazing in a city", "cooking with lentils",
    "drawing portraits", "how search engines rank pages", "pruning apple trees", "strong passwords", "river floods",
    "learning a second language", "jazz music", "packing for a hike", "electric cars", "the human heart",
    "lighthouses", "wood-fired ovens", "making a family budget", "coral reefs", "how bridges carry load",
    "fermenting vegetables", "the printing press", "origami", "wind turbines", "telling mushrooms apart",
    "urban trees", "playing the ukulele", "how glaciers move", "photographing children", "maps and projections",
    "cleaning up a hard disk", "rainwater barrels", "sign language", "growing herbs indoors", "choosing running shoes",
)  # fmt: skip

_INSTRUCTIONS = (
    "Summarise these notes in three sentences.",
    "List what has to be done, and by whom, from these notes.",
    "Write a friendly e-mail that tells the team what these notes say.",
    "What was decided, and what is still open?",
    "Turn these notes into five bullet points.",
    "What is the biggest risk in these notes, and what would you do about it?",
    "Give these notes a title and a summary of one sentence.",
)

_NOTES = {
    "Community garden, spring meeting": (
        "Fourteen members came, and Ruth took the minutes.",
        "The water bill doubled last summer because the hose by the shed leaked for three weeks.",
        "Amir will replace the hose before the end of April and keep the receipt for the treasurer.",
        "Plots 7 and 12 have stood empty since October; the waiting list has nine names on it.",
        "We agreed to halve both plots so that four families can start this season.",
        "The compost heap is too wet, so everyone should add cardboard or dry leaves with each bucket.",
        "Slugs took most of the lettuce, and Lena offered to try copper tape on two beds.",
        "The school would like to visit with twenty children on a Thursday morning in May.",
        "Somebody must be there to open the gate and to show the bee hotel.",
        "The shed key went missing again; a lock with a number would cost about forty euros.",
        "Peter thinks that a lock is too dear and wants to ask the allotment office first.",
        "The plant swap will be on the second Sunday of May, from ten until one.",
        "Cake and coffee are welcome, and the money goes into the fund for a new wheelbarrow.",
        "The next meeting is on the first Monday of June at the same place.",
    ),
    "Bakery, hand-over of the night shift": (
        "The large oven ran twenty degrees too hot until two o'clock, then it settled.",
        "Sixty rye loaves came out dark; we sold half to the canteen at a lower price.",
        "The technician is booked for Tuesday at seven and needs the panel on the left to be free.",
        "Flour type 550 is down to four sacks, which lasts until Wednesday at the usual pace.",
        "The supplier says that lorries are late all week because of the road works at the bridge.",
        "Marta swapped her Friday shift with Jonas, and both have signed the sheet.",
        "The new apprentice shaped his first hundred rolls, and only eleven went back into the bowl.",
        "Please show him the steam setting, since he has only read about it so far.",
        "A customer ordered three cakes for a wedding on Saturday, one of them without nuts.",
        "The cake without nuts must be made first, on a clean table, with the blue tools.",
        "The till was four euros short, and we could not find out why.",
        "The freezer door does not close by itself any more, so push it until it clicks.",
        "Yeast was delivered twice by mistake; the second box is in the cold room with a note on it.",
        "Nobody has ordered paper bags, and there are about three hundred left.",
    ),
    "School trip to the coast, planning": (
        "The trip takes place from the 9th to the 13th of June with two classes, 47 pupils in all.",
        "The hostel has confirmed fifty beds and wants the list of names by the middle of May.",
        "Six pupils are vegetarian, two eat no gluten, and one is allergic to peanuts.",
        "The train leaves at 8:12, and we change once, with only nine minutes on the platform.",
        "If we miss the connection, the next train goes an hour later and has no reserved seats.",
        "Mr Okafor will walk at the back and count heads at every door.",
        "The boat to the seal banks costs eleven euros each and does not sail in strong wind.",
        "As a second plan for a windy day, the museum of the lifeboats is free for school classes.",
        "Parents have asked whether phones are allowed; we settled on one hour in the evening.",
        "Three families need help with the cost, and the school fund can pay up to 400 euros.",
        "Everyone brings rubber boots, a rain jacket, a sun hat and a water bottle that does not leak.",
        "The nurse wants all medicines in one labelled box, with a letter from a parent for each.",
        "A fourth adult is missing so far; Ms Brandt will ask the trainee teachers this week.",
        "On the last evening each group shows what it found on the beach, in five minutes at most.",
    ),
    "Release 4.2, look back": (
        "The release went out nine days late, mostly because the import tests were flaky.",
        "Two of the flaky tests shared a temporary folder, which nobody had noticed for a year.",
        "Splitting the change into four small ones made the review much faster than last time.",
        "Support counted 31 tickets in the first week, and 19 of them were about the new login page.",
        "The login page asks for the company code, and most people do not know that they have one.",
        "Dana proposes to look the code up from the e-mail address, which is about three days of work.",
        "The database grew by a third in a month because old drafts are never deleted.",
        "We want to delete drafts after ninety days, but legal has to agree first.",
        "The rollback was rehearsed on Tuesday and took six minutes instead of the forty of last year.",
        "Nobody was on call on the Sunday after the release; we were lucky.",
        "From now on there is a named person for the first seven days after each release.",
        "The help pages still show the old menu in eleven places, and Kim has a list of them.",
        "Customers liked the faster search most of all, although we had hardly announced it.",
        "The next release is planned for the end of September and should hold fewer changes.",
    ),
    "Flat share, house rules after the talk": (
        "The rent goes up by 60 euros from July, and we split it by the size of the rooms.",
        "Noor has the largest room and pays 22 euros more, the other two pay 19 euros each.",
        "The kitchen is cleaned by whoever cooked, on the same evening, pans included.",
        "The bathroom plan hangs on the door and changes every Sunday at noon.",
        "Tom travels a lot for work and will pay for the cleaning things instead of every third turn.",
        "Guests may stay for three nights in a row; longer visits are agreed on in the group chat.",
        "The washing machine makes a loud noise when it spins, so please not after nine at night.",
        "The landlord has promised a repair three times, and Noor will now write a letter.",
        "The internet contract ends in October, and a faster one would cost four euros more.",
        "We all want the faster one as long as it does not run for more than a year.",
        "Bikes belong in the cellar, since the neighbour on the first floor trips over them.",
        "The spare key is with Mrs Lindqvist on the second floor, who is at home in the mornings.",
        "Shared food is on the top shelf of the fridge, and everything else belongs to somebody.",
        "We shall talk again in three months and see which of these rules have lasted.",
    ),
}

LONGEST_WORKLOAD = 8000
"""Most chats of one workload; well below the number of different questions, so that drawing a new one stays quick."""


def make_chats(count: int, seed: int) -> list[Chat]:
    """`count` chats with one system prompt and a different user text each.

    Three in four are short questions (about 10 to 30 tokens of text), the rest are pasted notes to work on (about 80 to
    330). The length of the answers is log-normal as in public traces: half are below 65 tokens, the mean is about 80.
    A larger workload of the same seed begins with the smaller one.

    Raises:
        InvalidRequestError: if `count` is negative or above `LONGEST_WORKLOAD`.
    """
    if not 0 <= count <= LONGEST_WORKLOAD:
        raise InvalidRequestError(f"a workload of {count} chats; it must be 0 to {LONGEST_WORKLOAD}")
    rng = random.Random(seed)
    users: dict[str, int] = {}
    while len(users) < count:
        user = _pasted_notes(rng) if rng.random() < 0.25 else _short_question(rng)
        users.setdefault(user, _answer_length(rng))
    return [Chat(SYSTEM_PROMPT, user, max_tokens) for user, max_tokens in users.items()]


def _short_question(rng: random.Random) -> str:
    return rng.choice(_QUESTIONS).format(topic=rng.choice(_TOPICS), reader=rng.choice(_READERS))


def _pasted_notes(rng: random.Random) -> str:
    """An instruction and some of the sentences of one set of notes, in their order."""
    title = rng.choice(tuple(_NOTES))
    sentences = _NOTES[title]
    chosen = sorted(rng.sample(range(len(sentences)), rng.randint(3, len(sentences))))
    return "\n".join([rng.choice(_INSTRUCTIONS), "", f"{title}:", *(f"- {sentences[index]}" for index in chosen)])


def _answer_length(rng: random.Random) -> int:
    return min(max(round(rng.lognormvariate(3.75, 0.75)), SHORTEST_ANSWER), LONGEST_ANSWER)
